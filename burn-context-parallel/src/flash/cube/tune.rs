//! Which of the tiles that give the same bits are the fastest, found by trying them: once for each kernel and size, by CubeCL's tuner, which
//! keeps what it found.

use std::fmt;
use std::sync::Arc;

use burn_cubecl::CubeTuneId;
use burn_cubecl::tensor::CubeTensor;
use cubecl::AutotuneKey;
use cubecl::ir::ElemType;
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use serde::{Deserialize, Serialize};

use super::super::blueprint::ALTERNATIVES;

/// What tiles are chosen for. Lengths count by their order of magnitude.
#[derive(Hash, Eq, PartialEq, Debug, Clone, Serialize, Deserialize, AutotuneKey)]
pub(super) struct TilesKey {
    pub kernel: String,
    pub element: ElemType,
    pub dim: usize,
    pub labels: bool,
    pub softcap: bool,
    #[autotune(anchor)]
    pub heads: usize,
    #[autotune(anchor)]
    pub own: usize,
    #[autotune(anchor)]
    pub other: usize,
}

/// Starts a kernel with the n-th alternative; its result.
#[derive(Clone)]
pub(super) struct Start(pub Arc<dyn Fn(usize) -> Result<CubeTensor, String> + Send + Sync>);

impl fmt::Debug for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Start")
    }
}

/// Starts the fastest alternative, after all were tried where it isn't known yet.
pub(super) fn fastest(key: TilesKey, like: &CubeTensor, start: Start) -> CubeTensor {
    static TUNER: LocalTuner<TilesKey, CubeTuneId> = local_tuner!();
    let id = CubeTuneId::new(&like.client, &like.device);
    let tunables = TUNER.init(&id, || {
        let key = |(key, _): &(TilesKey, Start)| key.clone();
        let inputs = |_: &TilesKey, inputs: &(TilesKey, Start)| inputs.clone();
        let set = TunableSet::new(key, inputs);
        (0..ALTERNATIVES).fold(set, |set, n| {
            set.with(Tunable::new(&format!("tiles_{n}"), move |(_, start): (TilesKey, Start)| (start.0)(n)))
        })
    });
    TUNER.execute(&id, &like.client, tunables, (key, start))
}
