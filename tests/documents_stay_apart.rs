//! Documents packed into one sequence are as if each ran alone: loss, gradients and outputs, under every scheme, on ranks whose
//! boundaries are nobody's. In f64, so that a difference is a fault and not rounding.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_context_parallel::attention::{ContextParallelDevice, SequenceContext};
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::{Batch, Document, Documents, IGNORE_INDEX, PerToken, SequenceLayout};
use burn_upipe::upipe::{AttentionScheme, UPipeAttentionConfig};
use llama::{Llama, LlamaConfig, ParallelConfig};
use rstest::rstest;
use tests::{assert_gradients, assert_same_bits, filled, gradients, on_ranks, summed, tensor, values};

const TOLERANCE: f64 = 1e-10;
const VOCABULARY: i64 = 19;
/// Six query heads on three key/value heads.
const HEADS: (usize, usize) = (6, 3);

fn model(parallel: &ParallelConfig) -> Llama {
    let config = LlamaConfig::new(VOCABULARY as usize, 12, 20, 2, HEADS.0, HEADS.1);
    let model = Llama::init(&config, parallel, &Device::flex().autodiff()).unwrap();
    filled(model, 1, DType::F64, 0.6)
}

/// A document of `len` tokens, of whose labels the first `ignored` do not count.
fn document(seed: i64, len: usize, ignored: usize) -> Document {
    let tokens: Vec<i64> = (0..len as i64).map(|i| (seed * 7 + i * i * 3 + i) % VOCABULARY).collect();
    let labels = tokens.iter().enumerate().map(|(i, id)| if i < ignored { IGNORE_INDEX } else { *id }).collect();
    Document::with_labels(tokens, labels).unwrap()
}

type Packing = (Vec<Vec<Document>>, usize);

/// What packs badly: lengths that no rank count divides, documents of one token, one over all ranks, padding, nothing but padding,
/// ranks without a target.
fn packings() -> Vec<(&'static str, Packing)> {
    let all = |seed, len| document(seed, len, 0);
    vec![
        ("uneven", (vec![vec![all(1, 3), all(2, 1), all(3, 11), all(4, 5)], vec![all(5, 21)]], 23)),
        ("only padding in a row", (vec![vec![all(1, 23)], vec![]], 23)),
        (
            "no target in front",
            (vec![vec![document(1, 12, 12), all(2, 8)], vec![document(3, 12, 12), all(4, 1), all(5, 9)]], 23),
        ),
        ("single tokens", (vec![vec![all(1, 1), all(2, 1), all(3, 1), all(4, 2)], vec![all(5, 4)]], 7)),
        ("no target at all", (vec![vec![all(1, 1), document(2, 6, 6)], vec![]], 9)),
    ]
}

type Answer = (f64, Vec<TensorData>);

/// The sum over the documents, each alone on one device.
fn alone(model: &Llama, (rows, _): &Packing) -> Answer {
    let targets = |document: &Document| document.labels().iter().skip(1).filter(|label| **label >= 0).count();
    let total = rows.iter().flatten().map(targets).sum();
    let group = ProcessGroup::single();
    let (losses, grads): (Vec<f64>, Vec<Vec<TensorData>>) = rows
        .iter()
        .flatten()
        .map(|document| {
            let labels = TensorData::new(document.labels().to_vec(), [1, document.labels().len()]);
            let batch = Batch::from_rows(&[document.tokens().to_vec()]).unwrap();
            let batch = batch.with_labels(Tensor::<2, Int>::from_data(labels, &Device::flex())).unwrap();
            let layout = SequenceLayout::contiguous(batch.len(), 1).unwrap();
            let shard = batch.shard(&layout, 0, &Device::flex().autodiff()).unwrap();
            let loss = model.loss_over(&shard, &group, total).unwrap();
            assert_eq!(loss.valid, targets(document));
            let grads = gradients(model, &loss.share.backward());
            (loss.share.into_scalar::<f64>(), grads)
        })
        .unzip();
    (losses.iter().sum(), summed(&grads))
}

/// The loss that every rank has, and the sum of the ranks' gradients.
fn packed(model: &Llama, batch: &Batch, world: &ProcessGroup) -> burn_context_parallel::Result<Answer> {
    let shard = Device::flex().autodiff().context_parallel(world).shard(batch)?;
    let loss = model
        .loss(&shard, world)
        .map_err(|error| burn_context_parallel::Error::invalid("loss", error.to_string(), ""))?;
    assert_eq!(loss.valid, batch.valid());
    let own = gradients(model, &loss.mean.backward());
    let all = own.into_iter().map(|grad| world.all_reduce(grad, burn_context_parallel::group::ReduceOp::Sum));
    Ok((loss.mean.into_scalar::<f64>(), all.collect::<burn_context_parallel::Result<_>>()?))
}

fn compare(case: &str, actual: &Answer, expected: &Answer) {
    let (a, b) = (actual.0, expected.0);
    assert!((a - b).abs() <= TOLERANCE * b.abs(), "{case}: loss {a}, alone {b}");
    assert_gradients(case, &actual.1, &expected.1, TOLERANCE);
}

fn techniques(scheme: AttentionScheme, all: bool) -> ParallelConfig {
    let plain = ParallelConfig { attention: scheme, ..ParallelConfig::none() };
    if !all {
        return plain;
    }
    ParallelConfig { checkpoint: true, mlp_tile: Some(3), norm_tile: Some(4), loss_tile: Some(2), ..plain }
}

fn schemes(ranks: usize) -> Vec<AttentionScheme> {
    let upipe =
        [None, Some(1), Some(4), Some(HEADS.0)].map(|heads_per_stage| AttentionScheme::UPipe { heads_per_stage });
    let single = (ranks == 1).then_some(AttentionScheme::Single);
    single.into_iter().chain([AttentionScheme::Ulysses]).chain(upipe).collect()
}

#[rstest]
fn loss_and_gradients_are_those_of_the_documents_alone(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(false, true)] all: bool,
) {
    let cases = packings();
    let expected: Vec<Answer> =
        cases.iter().map(|(_, packing)| alone(&model(&ParallelConfig::none()), packing)).collect();
    for scheme in schemes(ranks) {
        let answers: Vec<Vec<Answer>> = on_ranks(ranks, move |world| {
            let model = model(&techniques(scheme, all));
            packings().iter().map(|(_, (rows, len))| packed(&model, &Batch::packed(rows, *len)?, &world)).collect()
        });
        for answers in answers {
            for ((name, _), (actual, expected)) in cases.iter().zip(answers.iter().zip(&expected)) {
                compare(&format!("{name}, {scheme:?} on {ranks}, recomputing {all}"), actual, expected);
            }
        }
    }
    assert_eq!(expected[4].0, 0.0, "the last case has no target");
}

/// One model over packings of other lengths, rows and documents at every step; weights move, by plain gradient descent.
#[rstest]
fn packings_may_change_with_every_step(#[values(2, 3)] ranks: usize) {
    struct Descend(Vec<TensorData>);
    impl ModuleMapper for Descend {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let grad = self.0.remove(0);
            param.map(move |x| {
                let step = tensor::<1>(&grad, DType::F64, &x.device().inner()).reshape(x.dims());
                Tensor::from_inner(x.inner() - step * 0.3).require_grad()
            })
        }
    }
    let mut single = model(&ParallelConfig::none());
    let mut expected = Vec::new();
    for (_, packing) in packings() {
        let answer = alone(&single, &packing);
        single = single.map(&mut Descend(answer.1.clone()));
        expected.push(answer.0);
    }
    let losses: Vec<Vec<f64>> = on_ranks(ranks, |world| {
        let mut model = model(&techniques(AttentionScheme::default(), true));
        packings()
            .into_iter()
            .map(|(_, (rows, len))| {
                let (loss, grads) = packed(&model, &Batch::packed(&rows, len)?, &world)?;
                model = model.clone().map(&mut Descend(grads));
                Ok(loss)
            })
            .collect()
    });
    for losses in losses {
        for (step, (a, b)) in losses.iter().zip(&expected).enumerate() {
            assert!((a - b).abs() <= 1e-9 * b.abs(), "step {step}: {a}, alone {b}");
        }
    }
    assert!(expected[0] != expected[1] && expected.iter().all(|loss| loss.is_finite()));
}

fn ids_of((rows, len): &Packing) -> PerToken {
    let row = |row: &Vec<Document>| {
        let ids = row.iter().enumerate().flat_map(|(id, document)| vec![id as i64; document.tokens().len()]);
        ids.chain(std::iter::repeat(-1)).take(*len).collect::<Vec<_>>()
    };
    PerToken::per_row(&rows.iter().map(row).collect::<Vec<_>>()).unwrap()
}

/// What a tokenizer or a loader hands over: numbers per token, and a mask or labels, in either order.
#[test]
fn every_way_to_give_documents_gives_the_same_batch() {
    for (name, packing) in packings() {
        let (rows, len) = &packing;
        let expected = Batch::packed(rows, *len).unwrap();
        let padded = |row: &Vec<Document>, of: fn(&Document) -> &[i64], rest: i64| -> Vec<i64> {
            row.iter().flat_map(|document| of(document).to_vec()).chain(std::iter::repeat(rest)).take(*len).collect()
        };
        let tokens: Vec<Vec<i64>> = rows.iter().map(|row| padded(row, Document::tokens, 0)).collect();
        let labels: Vec<i64> = rows.iter().flat_map(|row| padded(row, Document::labels, IGNORE_INDEX)).collect();
        let shape = [rows.len(), *len];
        let counts: Vec<bool> = labels.iter().map(|label| *label >= 0).collect();
        let mask = || Tensor::<2, Bool>::from_data(TensorData::new(counts.clone(), shape), &Device::flex());
        let labels = || Tensor::<2, Int>::from_data(TensorData::new(labels.clone(), shape), &Device::flex());
        let (batch, documents) = (|| Batch::from_rows(&tokens).unwrap(), || Documents::from_ids(ids_of(&packing)));
        let ways = [
            batch().with_loss_mask(mask()).unwrap().with_documents(documents()).unwrap(),
            batch().with_documents(documents()).unwrap().with_loss_mask(mask()).unwrap(),
            batch().with_labels(labels()).unwrap().with_documents(documents()).unwrap(),
            batch().with_documents(documents()).unwrap().with_labels(labels()).unwrap(),
        ];
        for (way, actual) in ways.into_iter().enumerate() {
            assert_eq!(actual, expected, "{name}, way {way}");
        }
    }
}

/// Boundaries, as variable-length kernels have them, and numbers per token in any order are the documents that they describe.
#[rstest]
fn boundaries_and_numbers_are_the_same_documents(#[values(1, 2, 3, 4)] ranks: usize) {
    let lengths = [3, 1, 11, 5];
    let documents: Vec<Document> = lengths.iter().enumerate().map(|(i, len)| document(i as i64, *len, 0)).collect();
    let tokens: Vec<i64> = documents.iter().flat_map(|document| document.tokens().to_vec()).collect();
    let numbers = [7, 3, 9, 4].iter().zip(lengths).flat_map(|(id, len)| vec![*id; len]).collect();
    let batches = [
        Batch::packed(&[documents], 20).unwrap(),
        Batch::from_rows(std::slice::from_ref(&tokens))
            .unwrap()
            .with_documents(Documents::from_cu_seqlens(&[0, 3, 4, 15, 20]).unwrap())
            .unwrap(),
        Batch::from_rows(&[tokens]).unwrap().with_documents(Documents::from_ids(PerToken::shared(numbers))).unwrap(),
    ];
    let answers: Vec<Vec<Answer>> = on_ranks(ranks, move |world| {
        let model = model(&techniques(AttentionScheme::default(), false));
        batches.iter().map(|batch| packed(&model, batch, &world)).collect()
    });
    for answers in answers {
        assert!(answers.iter().all(|answer| answer.0.to_bits() == answers[0].0.to_bits() && answer.1 == answers[0].1));
    }
}

/// Outputs [1, S, E] of attention over documents of 5, 1, 9 and 8 tokens, with one token replaced.
fn output(scheme: AttentionScheme, causal: bool, ranks: usize, changed: Option<usize>) -> Tensor<3> {
    let layout = SequenceLayout::contiguous(23, ranks).unwrap();
    let of_ranks = layout.clone();
    let parts = on_ranks(ranks, move |world| {
        let device = Device::flex();
        let mut x = tensor::<3>(&values(3, &[1, 23, 8]), DType::F32, &device);
        if let Some(at) = changed {
            x = x.slice_assign([0..1, at..at + 1, 0..8], Tensor::full([1, 1, 8], -3.0, &device));
        }
        let module = UPipeAttentionConfig::new(8, 6, 3, 4).with_causal(causal).init(&device)?.with_scheme(scheme)?;
        let module = filled(module, 20, DType::F32, 1.0);
        let documents = Documents::from_lengths(&[5, 1, 9, 8]).unwrap();
        let batch = Batch::from_rows(&[vec![0; 23]])?.with_documents(documents)?;
        let shard = batch.shard(&of_ranks, world.rank(), &device)?;
        let context = SequenceContext::new(&world, &shard)?;
        Ok(module.forward_in(of_ranks.cut(&x, 1, world.rank()), &context)?.to_data())
    });
    let parts: Vec<Tensor<3>> = parts.iter().map(|part| tensor(part, DType::F32, &Device::flex())).collect();
    layout.assemble(&parts, 1)
}

#[rstest]
fn a_changed_token_changes_no_bit_of_another_document(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(true, false)] causal: bool,
) {
    for scheme in schemes(ranks) {
        let before = output(scheme, causal, ranks, None);
        for (changed, own) in [(2, 0..5), (5, 5..6), (8, 6..15), (22, 15..23)] {
            let after = output(scheme, causal, ranks, Some(changed));
            for (from, to) in [(0, own.start), (own.end, 23)] {
                if from < to {
                    let part = |x: &Tensor<3>| x.clone().narrow(1, from, to - from);
                    let case = format!("{scheme:?} on {ranks}, causal {causal}, token {changed}: {from}..{to}");
                    assert_same_bits(case, &part(&after), &part(&before));
                }
            }
            let part = |x: &Tensor<3>| x.clone().narrow(1, changed, 1).to_data();
            assert_ne!(part(&before), part(&after), "the token sees itself");
        }
    }
}

/// Positions that are given stay, in whichever order they and the documents come; documents bound attention and targets as ever.
#[test]
fn given_positions_are_kept_beside_documents() {
    let tokens = || Batch::from_rows(&[(0..8).collect()]).unwrap();
    let documents = || Documents::from_lengths(&[3, 5]).unwrap();
    let positions = || PerToken::shared((100..108).collect());
    let batches = [
        tokens().with_positions(positions()).unwrap().with_documents(documents()).unwrap(),
        tokens().with_documents(documents()).unwrap().with_positions(positions()).unwrap(),
    ];
    assert_eq!(batches[0], batches[1]);
    let shard = batches[0].shard(&SequenceLayout::contiguous(8, 2).unwrap(), 1, &Device::flex()).unwrap();
    assert_eq!(shard.positions_host()[..], [104, 105, 106, 107]);
    assert_eq!(shard.documents(), Some(&documents()));
    assert_eq!(batches[0].valid(), 2 + 4);
    let restarting = tokens().with_documents(documents()).unwrap();
    let shard = restarting.shard(&SequenceLayout::contiguous(8, 2).unwrap(), 1, &Device::flex()).unwrap();
    assert_eq!(shard.positions_host()[..], [1, 2, 3, 4]);
}
