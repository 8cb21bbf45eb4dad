//! Saved by any number of ranks in pieces cut in any way, a checkpoint gives any range of any tensor on any number of ranks.

mod common;

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use burn_context_parallel::group::launch;
use burn_upipe::learner::checkpoint::{Checkpoint, CheckpointError, Checkpoints, Piece, RunState};
use common::{part, values};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use safetensors::SafeTensors;

#[derive(Debug, Clone)]
struct Tensor {
    data: TensorData,
    /// Ends of pieces, and who saves them.
    pieces: Vec<(Range<usize>, usize)>,
    /// What is read.
    asked: Vec<Range<usize>>,
}

fn tensor(ranks: usize) -> impl Strategy<Value = Tensor> {
    let dtype = select(vec![DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64, DType::U8]);
    let shape = prop::collection::vec(0usize..9, 0..4);
    let cuts = prop::collection::vec((any::<Index>(), 0..ranks), 1..8);
    let asked = prop::collection::vec(any::<(Index, Index)>(), 1..6);
    (dtype, shape, cuts, asked, any::<u64>()).prop_map(|(dtype, shape, mut cuts, asked, seed)| {
        let data = values(&shape, dtype, seed);
        let n = data.num_elements();
        let mut ends: Vec<_> = cuts.iter().map(|(cut, _)| cut.index(n + 1)).collect();
        ends.sort_unstable();
        *ends.last_mut().unwrap() = n;
        let starts = std::iter::once(0).chain(ends.clone());
        let pieces = starts.zip(ends.iter().copied()).map(|(start, end)| (start..end, cuts.pop().unwrap().1)).collect();
        let asked = asked.iter().map(|(a, b)| {
            let (a, b) = (a.index(n + 1), b.index(n + 1));
            a.min(b)..a.max(b)
        });
        Tensor { data, pieces, asked: asked.collect() }
    })
}

fn case() -> impl Strategy<Value = (usize, usize, Vec<Tensor>)> {
    (1usize..5, 1usize..5).prop_flat_map(|(from, to)| (Just(from), Just(to), prop::collection::vec(tensor(from), 0..5)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_range_comes_back((from, to, tensors) in case()) {
        let out = tempfile::tempdir().unwrap();
        let tensors = Arc::new(tensors);
        let (folder, given) = (out.path().to_owned(), tensors.clone());
        let path = launch(from, move |world| {
            let pieces = given.iter().enumerate().flat_map(|(i, Tensor { data, pieces, .. })| {
                let mine = pieces.iter().filter(|(_, rank)| *rank == world.rank());
                mine.map(move |(range, _)| Piece::new(
                    format!("t{i}"), data.dtype(), data.shape().to_vec(), range.clone(),
                    || Ok::<_, CheckpointError>(part(data, range.clone())),
                ))
            });
            Checkpoints::new(&folder, None).save(&world, pieces, &RunState { step: 3, ..RunState::default() })
        }).unwrap()[0].clone();

        let (folder, expected) = (out.path().to_owned(), tensors.clone());
        launch(to, move |world| {
            let latest = Checkpoints::new(&folder, None).latest(&world)?.expect("one was saved");
            assert_eq!((latest.step(), latest.ranks(), latest.names().len()), (3, from, expected.len()));
            for (i, Tensor { data, asked, .. }) in expected.iter().enumerate() {
                let name = format!("t{i}");
                latest.expect(&name, data.dtype(), data.shape())?;
                // Each rank reads something else.
                for range in asked.iter().skip(world.rank()) {
                    let read = latest.read(&name, range.clone())?;
                    assert_eq!((read.dtype(), read.shape().to_vec()), (data.dtype(), vec![range.len()]));
                    assert!(read.as_bytes() == part(data, range.clone()).as_bytes(), "{name} {range:?}");
                }
                assert!(latest.read_whole(&name)?.as_bytes() == data.as_bytes(), "{name}");
            }
            Ok::<_, CheckpointError>(())
        }).unwrap();
        plain_files(&path, &tensors);
    }
}

/// The files are ordinary ones, with the same values, that others can read.
fn plain_files(path: &std::path::Path, tensors: &[Tensor]) {
    let ranks = Checkpoint::open(path).unwrap().ranks();
    for rank in 0..ranks {
        let bytes = std::fs::read(path.join(format!("rank-{rank:04}-of-{ranks:04}.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut count = 0;
        for (i, Tensor { data, pieces, .. }) in tensors.iter().enumerate() {
            for (range, _) in pieces.iter().filter(|(range, owner)| *owner == rank && !range.is_empty()) {
                let whole = range.len() == data.num_elements();
                let name = if whole { format!("t{i}") } else { format!("t{i}[{}..{}]", range.start, range.end) };
                let view = file.tensor(&name).unwrap();
                let shape = if whole { data.shape().to_vec() } else { vec![range.len()] };
                assert_eq!(view.shape(), shape);
                assert!(view.data() == part(data, range.clone()).as_bytes());
                count += 1;
            }
        }
        assert_eq!(file.len(), count);
    }
}

#[test]
fn elements_that_do_not_exist_are_refused() {
    let out = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(common::save(out.path(), 1, 2).unwrap()).unwrap();
    let name = "block.0.weight";
    assert_eq!(checkpoint.shape(name).unwrap(), [7, 5]);
    #[expect(clippy::reversed_empty_ranges, reason = "what a wrong caller would ask for")]
    for range in [0..36, 36..36, 5..4, 0..usize::MAX, usize::MAX..usize::MAX] {
        let error = checkpoint.read(name, range.clone()).unwrap_err();
        assert!(matches!(error, CheckpointError::Invalid { .. }), "{range:?}: {error}");
    }
    let error = checkpoint.read("block.9.weight", 0..1).unwrap_err();
    assert!(
        matches!(error, CheckpointError::NoSuchTensor { .. }) && error.to_string().contains("block.0.weight"),
        "{error}"
    );
    for (dtype, shape) in [(DType::F64, [7, 5]), (DType::F32, [5, 7])] {
        let error = checkpoint.expect(name, dtype, &shape).unwrap_err();
        assert!(matches!(error, CheckpointError::Mismatch { .. }), "{error}");
    }
}
