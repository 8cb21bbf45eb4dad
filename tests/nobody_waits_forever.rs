//! A rank that panics in any collective of a training step releases all others with an error that names it.
//!
//! Every exchange of a step with all techniques on is met once, forward, recomputation, backward and gradient sum: the step is
//! run as often as it has exchanges, and each time another one panics.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::collective::sum_gradients;
use burn_context_parallel::group::{
    Call, Cause, Counters, GroupError, LaunchConfig, LaunchError, Parcel, ProcessGroup, Transport, launch_each,
};
use burn_context_parallel::sequence::Batch;
use burn_context_parallel::{Error, Result};
use burn_upipe::upipe::AttentionScheme;
use llama::{Llama, LlamaConfig, ParallelConfig, clip_grad_norm};
use rstest::rstest;

/// Longer than any step here by far: a test that meets it has found a hang.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A transport whose n-th exchange fails in some way.
#[derive(Debug)]
struct Faulty {
    inner: Arc<dyn Transport>,
    exchanges: AtomicUsize,
    fault_at: usize,
    fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Panic,
    Error,
}

impl Transport for Faulty {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn members(&self) -> &[usize] {
        self.inner.members()
    }
    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Transport>> {
        self.inner.subgroup(members)
    }
    fn begin(&self) -> u64 {
        self.inner.begin()
    }
    fn exchange(&self, call: &Call, parcels: Vec<Option<Parcel>>) -> Result<Vec<Option<Parcel>>> {
        if self.exchanges.fetch_add(1, SeqCst) == self.fault_at {
            match self.fault {
                Fault::Panic => std::panic::resume_unwind(Box::new("injected fault".to_string())),
                Fault::Error => return Err(Error::unsupported("exchange", "injected fault", "none")),
            }
        }
        self.inner.exchange(call, parcels)
    }
    fn fail(&self, cause: Cause) {
        self.inner.fail(cause);
    }
    fn failure(&self) -> Option<GroupError> {
        self.inner.failure()
    }
    fn counters(&self) -> &Arc<Counters> {
        self.inner.counters()
    }
    fn prepare(&self, parcel: Parcel) -> Result<Parcel> {
        self.inner.prepare(parcel)
    }
}

/// One training step up to the summed gradients, on this rank.
fn step(group: &ProcessGroup, attention: AttentionScheme, batch: &Batch) -> Result<()> {
    let device = Device::flex().autodiff();
    let cp = device.context_parallel(group);
    let config = LlamaConfig::new(16, 8, 12, 2, 4, 2);
    let parallel = ParallelConfig {
        attention,
        mlp_tile: Some(3),
        norm_tile: Some(2),
        loss_tile: Some(2),
        ..ParallelConfig::all()
    };
    let model = Llama::init(&config, &parallel, &device).expect("a valid model");
    let shard = cp.shard(batch)?;
    let loss = cp.scope(&shard, || model.loss(&shard, group)).map_err(core)?;
    let grads = GradientsParams::from_grads(loss.mean.backward(), &model);
    let grads = sum_gradients(grads, &model, group)?;
    clip_grad_norm(grads, &model, 1.0, group)?;
    Ok(())
}

fn core(error: llama::LlamaError) -> Error {
    match error {
        llama::LlamaError::Core(error) => error,
        other => panic!("{other}"),
    }
}

/// Every rank's outcome when `culprit` fails in its exchange number `fault_at`; and how many exchanges it made.
fn run(
    ranks: usize,
    attention: AttentionScheme,
    culprit: usize,
    fault_at: usize,
    fault: Fault,
) -> (Vec<std::result::Result<(), LaunchError>>, usize) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let batch = Batch::from_rows(&[(0..13).collect()]).unwrap();
    let started = Instant::now();
    let outcomes = launch_each(LaunchConfig::new(ranks).with_timeout(TIMEOUT), move |world: ProcessGroup| {
        let fault_at = if world.rank() == culprit { fault_at } else { usize::MAX };
        let faulty =
            Arc::new(Faulty { inner: world.transport().clone(), exchanges: AtomicUsize::new(0), fault_at, fault });
        let result = step(&ProcessGroup::from_transport(faulty.clone()), attention, &batch);
        if world.rank() == culprit {
            counted.store(faulty.exchanges.load(SeqCst), SeqCst);
        }
        result
    })
    .expect("launched");
    assert!(started.elapsed() < TIMEOUT, "released by the timeout only");
    (outcomes, count.load(SeqCst))
}

#[rstest]
fn a_rank_that_fails_in_any_exchange_releases_all_others(
    #[values(AttentionScheme::Ulysses, AttentionScheme::UPipe { heads_per_stage: None })] attention: AttentionScheme,
    #[values(2, 3)] ranks: usize,
    #[values(Fault::Panic, Fault::Error)] fault: Fault,
) {
    let (outcomes, exchanges) = run(ranks, attention, 0, usize::MAX, fault);
    assert!(outcomes.iter().all(|outcome| outcome.is_ok()), "{outcomes:?}");
    assert!(exchanges > 40, "a step with two checkpointed layers has many exchanges, this one {exchanges}");
    for fault_at in 0..exchanges {
        let culprit = fault_at % ranks;
        let (outcomes, _) = run(ranks, attention, culprit, fault_at, fault);
        for (rank, outcome) in outcomes.iter().enumerate() {
            let error = outcome.as_ref().expect_err("no rank can finish the step");
            assert!(error.to_string().contains("injected fault"), "exchange {fault_at}, rank {rank}: {error}");
            if rank == culprit {
                continue;
            }
            let met = error.group_error().unwrap_or_else(|| panic!("exchange {fault_at}, rank {rank}: {error}"));
            assert_eq!(met.rank, culprit, "exchange {fault_at}, rank {rank}");
            match fault {
                Fault::Panic => assert!(matches!(&met.cause, Cause::Panicked(message) if message == "injected fault")),
                Fault::Error => assert!(matches!(&met.cause, Cause::Failed(_)), "{:?}", met.cause),
            }
        }
    }
}
