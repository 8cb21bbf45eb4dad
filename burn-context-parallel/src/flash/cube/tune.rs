//! Which of the tiles that give the same bits are the fastest, found by trying them: once for each kernel and size, by CubeCL's tuner, which
//! keeps what it found.

use std::fmt;
use std::sync::Arc;

use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeDevice, CubeTuneId};
use cubecl::AutotuneKey;
use cubecl::ir::ElemType;
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use serde::{Deserialize, Serialize};

use super::super::blueprint::{ALTERNATIVES, Blueprint, Family, Tiles};
use super::super::{FlashOptions, FlashShape};
use super::launch::{FORWARD, KEYS, QUERIES, of_keys, of_queries};
use super::table::Labels;

/// What tiles are chosen for. Lengths count by their order of magnitude.
#[derive(Hash, Eq, PartialEq, Debug, Clone, Serialize, Deserialize, AutotuneKey)]
pub(super) struct TilesKey {
    kernel: String,
    element: ElemType,
    dim: usize,
    labels: bool,
    softcap: bool,
    #[autotune(anchor)]
    heads: usize,
    #[autotune(anchor)]
    own: usize,
    #[autotune(anchor)]
    other: usize,
}

impl TilesKey {
    /// `sizes` are heads, over all sequences, own rows, and the other side's.
    fn of(
        kernel: String,
        element: ElemType,
        dim: usize,
        labels: bool,
        softcap: bool,
        [heads, own, other]: [usize; 3],
    ) -> Self {
        Self::new(kernel, element, dim, labels, softcap, heads, own, other)
    }
}

/// Starts a kernel with the n-th alternative; its result.
#[derive(Clone)]
pub(super) struct Start(pub Arc<dyn Fn(usize) -> Result<CubeTensor, String> + Send + Sync>);

impl fmt::Debug for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Start")
    }
}

static TUNER: LocalTuner<TilesKey, CubeTuneId> = local_tuner!();

/// Starts the fastest alternative, after all were tried where it isn't known yet.
pub(super) fn fastest(key: TilesKey, like: &CubeTensor, start: Start) -> CubeTensor {
    let id = CubeTuneId::new(&like.client, &like.device);
    let set = set(&id);
    TUNER.execute(&id, &like.client, set, (key, start))
}

/// Which alternative is the fastest, if that was found out.
fn found(key: &TilesKey, device: &CubeDevice) -> Option<usize> {
    let id = CubeTuneId::new(&device.client(), device);
    TUNER.fastest_identity(&id, &set(&id), key)
}

fn set(id: &CubeTuneId) -> Arc<TunableSet<TilesKey, (TilesKey, Start), CubeTensor, usize>> {
    TUNER.init(id, || {
        let key = |(key, _): &(TilesKey, Start)| key.clone();
        let inputs = |_: &TilesKey, inputs: &(TilesKey, Start)| inputs.clone();
        (0..ALTERNATIVES).fold(TunableSet::new(key, inputs), |set, n| {
            set.with(Tunable::identified(n, move |(_, start): (TilesKey, Start)| (start.0)(n)))
        })
    })
}

/// What a kernel's tiles are tuned for.
pub(super) fn key(
    shape: &FlashShape,
    dtype: DType,
    options: &FlashOptions,
    family: Family,
    kernel: &str,
    [heads, own, other]: [usize; 3],
) -> TilesKey {
    let (labels, softcap) = (Labels::of(options).any(), options.softcap.is_some());
    let sizes = [shape.batch * heads, own, other];
    let element = dtype_to_elem_type(dtype);
    TilesKey::of(format!("{family} {kernel}"), element, shape.head_dim, labels, softcap, sizes)
}

/// The blueprint with the tiles that were found to be the fastest, where that is known and nobody forced others.
pub(super) fn tuned(
    blueprint: Blueprint,
    device: &CubeDevice,
    shape: &FlashShape,
    dtype: DType,
    options: &FlashOptions,
) -> Blueprint {
    if options.blueprint.is_some() {
        return blueprint;
    }
    let family = blueprint.family;
    let fastest = |kernel: &str, tiles: Tiles, sizes: [usize; 3]| {
        let found = found(&key(shape, dtype, options, family, kernel, sizes), device);
        found.map_or(tiles, |n| tiles.alternatives(family)[n])
    };
    Blueprint {
        family,
        forward: fastest(FORWARD, blueprint.forward, of_queries(shape)),
        queries: fastest(QUERIES, blueprint.queries, of_queries(shape)),
        keys: fastest(KEYS, blueprint.keys, of_keys(shape)),
    }
}

#[cfg(test)]
mod tests {
    use cubecl::prelude::*;

    use super::*;

    /// Or training on documents of many lengths would tune for ever.
    #[test]
    fn lengths_of_one_order_share_what_was_found() {
        let key = |own, other| TilesKey::of("dq".into(), f32::elem_type_native(), 64, false, false, [8, own, other]);
        assert_eq!(key(1000, 3000), key(1001, 2999));
        assert_ne!(key(1000, 3000), key(1000, 300));
    }
}
