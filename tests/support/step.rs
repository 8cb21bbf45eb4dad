//! One training step of a small Llama on every rank: what offload, devices and the like must not change.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, TensorData};
use burn_context_parallel::Result;
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::fsdp::{Fsdp, FsdpConfig};
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::Batch;
use burn_upipe::offload::{Offload, saved_bytes};
use burn_upipe::upipe::AttentionScheme;
use llama::{Llama, LlamaConfig, ParallelConfig, named_gradients, precision};

use crate::{filled, on_ranks};

const WIDTH: usize = 16;
const TOKENS: usize = 26;

/// A step's setting, without offload.
#[derive(Clone, Debug)]
pub struct Step {
    /// Ranks of the sequence.
    pub ranks: usize,
    /// Blocks of the model.
    pub layers: usize,
    /// Scheme, recomputation, tiles.
    pub parallel: ParallelConfig,
    /// Shards, if there are.
    pub fsdp: Option<FsdpConfig>,
    /// Of weights and activations, where there are no shards.
    pub dtype: DType,
    /// Batches whose gradients are taken one after the other.
    pub micro_batches: usize,
}

/// Losses and gradients, with their names.
pub type Named = Vec<(String, TensorData)>;

impl Step {
    /// Nothing but the scheme.
    pub fn plain(ranks: usize, attention: AttentionScheme, layers: usize) -> Self {
        let parallel = ParallelConfig { attention, ..ParallelConfig::none() };
        Self { ranks, layers, parallel, fsdp: None, dtype: DType::F32, micro_batches: 1 }
    }

    /// Blocks recomputed, everything in tiles that do not come out even.
    pub fn all(ranks: usize, attention: AttentionScheme, layers: usize) -> Self {
        let tiles =
            ParallelConfig { mlp_tile: Some(5), norm_tile: Some(4), loss_tile: Some(3), ..ParallelConfig::all() };
        Self { parallel: ParallelConfig { attention, ..tiles }, ..Self::plain(ranks, attention, layers) }
    }

    /// All ranks' losses and gradients; rank r is on device r modulo their count, with an engine of its own.
    pub fn run(
        &self,
        devices: &[Device],
        engine: impl Fn() -> Result<Option<Offload>> + Send + Sync + 'static,
    ) -> Vec<Named> {
        let (step, devices) = (self.clone(), devices.to_vec());
        on_ranks(self.ranks, move |world| {
            let device = devices[world.rank() % devices.len()].clone();
            step.on_rank(&world, &device.autodiff(), engine()?)
        })
    }

    fn on_rank(&self, world: &ProcessGroup, device: &Device, engine: Option<Offload>) -> Result<Named> {
        let config = LlamaConfig::new(32, WIDTH, 24, self.layers, 4, 2);
        let model = Llama::init(&config, &self.parallel, device).expect("a model");
        let mut model = filled(model, 3, DType::F32, 0.3).fork(device);
        let fsdp = self.fsdp.clone().map(|config| Fsdp::over(world, config)).transpose()?;
        if let Some(fsdp) = &fsdp {
            model = fsdp.shard(model)?;
        }
        if let Some(engine) = &engine {
            model = model.offload(engine);
        }
        let compute = if fsdp.is_some() { model.clone() } else { precision::compute(&model, self.dtype) };
        let cp = device.context_parallel(world);
        let mut found = Vec::new();
        if let Some(fsdp) = &fsdp {
            fsdp.begin(&model);
        }
        for micro in 0..self.micro_batches {
            let row = (0..TOKENS as i64).map(|i| (i * 7 + micro as i64) % 32).collect();
            let loss = compute.loss(&cp.shard(&Batch::from_rows(&[row])?)?, world).expect("a loss");
            found.push((format!("loss {micro}"), loss.mean.clone().inner().into_data()));
            if let Some(engine) = &engine {
                self.everything_is_saved(engine);
            }
            let grads = GradientsParams::from_grads(loss.mean.backward(), &compute);
            let grads = match &fsdp {
                Some(fsdp) if micro + 1 == self.micro_batches => fsdp.finish(grads, &model)?,
                _ => grads,
            };
            found.extend(named_gradients(&model, &grads));
        }
        if let Some(engine) = &engine {
            let stats = engine.stats();
            assert_eq!((stats.saved, stats.host_bytes, stats.disk_bytes, stats.in_flight), (0, 0, 0, 0), "{stats:?}");
            assert!(stats.in_flight_peak <= engine.config().in_flight, "{stats:?}");
        }
        Ok(found)
    }

    /// The input of each checkpoint, and nothing else.
    fn everything_is_saved(&self, engine: &Offload) {
        let stats = engine.stats();
        let checkpoints = self.layers.div_ceil(self.parallel.blocks_per_checkpoint);
        assert_eq!(stats.saved, checkpoints, "{stats:?}");
        let size = if self.fsdp.is_some() { 4 } else { self.dtype.size() };
        let bytes = saved_bytes(checkpoints, 1, TOKENS.div_ceil(self.ranks), WIDTH, size);
        let all = stats.device_bytes + stats.host_bytes + stats.disk_bytes as usize;
        assert_eq!(all, bytes, "{stats:?}");
    }
}
