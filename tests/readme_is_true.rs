//! The README's support table is what the code answers when asked: every line of it is tried here, forward and backward, on one
//! rank and on two. Its program is a documentation test of this package.

use std::fmt::Write;

use burn::nn::{DropoutConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Gradients, Int, Tensor};
use burn_context_parallel::attention::{SequenceContext, attention_with, scope, try_attention};
use burn_context_parallel::flash::FlashOptions;
use burn_context_parallel::group::{LaunchError, ProcessGroup, launch};
use burn_context_parallel::sequence::{Documents, PerToken, RotaryFrequencies, SequenceLayout};
use burn_context_parallel::{Error, Result};
use burn_upipe::checkpoint::Checkpointed;
use burn_upipe::tiling::{TiledLinearCrossEntropy, TiledMlp, TiledNorm};
use burn_upipe::upipe::{AttentionScheme, UPipeAttentionConfig};
use llama::device::{DeviceChoice, DeviceError, Runtime, Standing};
use tests::{skipped, tensor, values};

/// One thing to ask for: refused as an error, or computed with finite gradients.
type Probe = fn(ProcessGroup) -> Result<()>;

/// The table's lines, under its headings.
const LINES: [(&str, &[(&str, Probe)]); 4] = [
    (
        "`attention`",
        &[
            ("causal", |world| attend(world, Ask::default())),
            ("not causal", |world| attend(world, Ask { causal: false, ..Ask::default() })),
            ("a scale other than 1 / sqrt(D)", |world| attend(world, Ask { scale: Some(0.7), ..Ask::default() })),
            ("fewer key/value heads than query heads", |world| attend(world, Ask { heads: (4, 2), ..Ask::default() })),
            ("fewer heads than ranks", |world| attend(world, Ask { heads: (1, 1), ..Ask::default() })),
            ("heads that the ranks do not divide", |world| attend(world, Ask { heads: (3, 3), ..Ask::default() })),
            ("a length that the ranks do not divide", |world| attend(world, Ask { seq: 9, ..Ask::default() })),
            ("a value head dimension other than D", |world| attend(world, Ask { value_dim: 6, ..Ask::default() })),
            ("a dense mask", |world| attend(world, Ask { mask: true, ..Ask::default() })),
            ("an attention bias", |world| attend(world, Ask { bias: true, ..Ask::default() })),
            ("a softcap", |world| attend(world, Ask { softcap: Some(30.0), ..Ask::default() })),
            ("a sliding window", |world| attend(world, Ask { window: Some(3), ..Ask::default() })),
            ("a window to both sides", |world| {
                attend(world, Ask { causal: false, window: Some(3), lookahead: Some(2), ..Ask::default() })
            }),
            ("documents packed into a sequence", |world| attend(world, Ask { documents: true, ..Ask::default() })),
            ("positions per token", |world| attend(world, Ask { positions: true, ..Ask::default() })),
        ],
    ),
    (
        "element types",
        &[
            ("f64", |world| attend(world, Ask { dtype: DType::F64, ..Ask::default() })),
            ("f32", |world| attend(world, Ask { dtype: DType::F32, ..Ask::default() })),
            ("f16, computed in f32", |world| attend(world, Ask { dtype: DType::F16, ..Ask::default() })),
            ("bf16, computed in f32", |world| attend(world, Ask { dtype: DType::BF16, ..Ask::default() })),
        ],
    ),
    (
        "`UPipeAttention`",
        &[
            ("`AttentionScheme::Single`", |world| module(world, AttentionScheme::Single)),
            ("`AttentionScheme::Ulysses`", |world| module(world, AttentionScheme::Ulysses)),
            ("`AttentionScheme::UPipe`, any U from 1 to H", |world| {
                (1..=4).try_for_each(|u| module(world.clone(), AttentionScheme::UPipe { heads_per_stage: Some(u) }))
            }),
        ],
    ),
    (
        "recomputation",
        &[
            ("a checkpointed block", |world| checkpoint(world, false)),
            ("a checkpointed block with dropout", |world| checkpoint(world, true)),
            ("a tiled feed-forward", tiled_mlp),
            ("a tiled norm", tiled_norm),
            ("tiled logits and loss", tiled_loss),
        ],
    ),
];

struct Ask {
    heads: (usize, usize),
    seq: usize,
    value_dim: usize,
    causal: bool,
    scale: Option<f64>,
    softcap: Option<f64>,
    window: Option<usize>,
    lookahead: Option<usize>,
    documents: bool,
    positions: bool,
    mask: bool,
    bias: bool,
    dtype: DType,
    device: Option<Device>,
}

impl Default for Ask {
    fn default() -> Self {
        Self {
            heads: (4, 4),
            seq: 8,
            value_dim: 4,
            causal: true,
            scale: None,
            softcap: None,
            window: None,
            lookahead: None,
            documents: false,
            positions: false,
            mask: false,
            bias: false,
            dtype: DType::F32,
            device: None,
        }
    }
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn leaf<const D: usize>(shape: [usize; D], dtype: DType) -> Tensor<D> {
    leaf_on(shape, dtype, &device())
}

fn leaf_on<const D: usize>(shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    tensor::<D>(&values(7, &shape), dtype, device).require_grad()
}

fn finite<const D: usize>(x: &Tensor<D>, grads: &Gradients) {
    let grad = x.grad(grads).expect("a gradient");
    assert!(grad.into_data().iter::<f64>().all(f64::is_finite));
}

/// The scope of this rank's part of a sequence.
fn inside<T>(world: &ProcessGroup, seq: usize, f: impl FnOnce(usize) -> Result<T>) -> Result<T> {
    let context = SequenceContext::from_layout(world, SequenceLayout::contiguous(seq, world.size())?, 1)?;
    let local = context.local_len();
    scope(Some(context), || f(local))
}

fn attend(world: ProcessGroup, ask: Ask) -> Result<()> {
    inside(&world, ask.seq, |local| {
        let (heads, kv_heads) = ask.heads;
        let place = ask.device.clone().unwrap_or_else(device);
        let q = leaf_on([1, heads, local, 4], ask.dtype, &place);
        let k = leaf_on([1, kv_heads, local, 4], ask.dtype, &place);
        let v = leaf_on([1, kv_heads, local, ask.value_dim], ask.dtype, &place);
        let mask = ask.mask.then(|| Tensor::<4, Bool>::full([1, heads, local, local], false, &device()));
        let bias = ask.bias.then(|| leaf([1, heads, local, local], ask.dtype));
        let mut options = if ask.causal { FlashOptions::causal() } else { FlashOptions::full() };
        (options.window, options.lookahead) = (ask.window, ask.lookahead);
        if ask.documents {
            options = options.with_documents(Documents::from_lengths(&[ask.seq - 5, 5]).unwrap());
        }
        if ask.positions {
            let positions = PerToken::shared((0..ask.seq as i64).rev().collect());
            options = options.with_positions(positions.clone(), positions);
        }
        let out = if options == FlashOptions::full() || options == FlashOptions::causal() {
            let options = AttentionModuleOptions { scale: ask.scale, softcap: ask.softcap, is_causal: ask.causal };
            try_attention(q.clone(), k.clone(), v.clone(), mask, bias, options)?
        } else {
            attention_with(q.clone(), k.clone(), v.clone(), &options)?
        };
        let grads = out.sum().backward();
        [q, k, v].iter().for_each(|x| finite(x, &grads));
        Ok(())
    })
}

fn module(world: ProcessGroup, scheme: AttentionScheme) -> Result<()> {
    inside(&world, 8, |local| {
        let attention = UPipeAttentionConfig::new(8, 4, 2, 4)
            .init(&device())?
            .with_rotary(RotaryFrequencies::new(4, 10_000.0)?)?
            .with_scheme(scheme)?;
        let x = leaf([1, local, 8], DType::F32);
        let grads = attention.forward(x.clone()).sum().backward();
        finite(&x, &grads);
        finite(&attention.k_proj.weight.val(), &grads);
        Ok(())
    })
}

fn checkpoint(world: ProcessGroup, dropout: bool) -> Result<()> {
    inside(&world, 8, |local| {
        let block = Checkpointed::new(LinearConfig::new(8, 8).init(&device()));
        let dropout = dropout.then(|| DropoutConfig::new(0.5).init());
        let x = leaf([1, local, 8], DType::F32);
        let y = block.forward(x.clone(), move |linear: &Linear, x| {
            let y = linear.forward(x);
            dropout.as_ref().map_or(y.clone(), |dropout| dropout.forward(y))
        });
        finite(&x, &y.sum().backward());
        Ok(())
    })
}

fn tiled_mlp(world: ProcessGroup) -> Result<()> {
    inside(&world, 8, |local| {
        let mlp = TiledMlp::new(LinearConfig::new(8, 8).init(&device()), Some(3));
        let x = leaf([1, local, 8], DType::F32);
        finite(&x, &mlp.forward(x.clone(), |linear: &Linear, x| linear.forward(x)).sum().backward());
        Ok(())
    })
}

fn tiled_norm(world: ProcessGroup) -> Result<()> {
    inside(&world, 8, |local| {
        let norm = TiledNorm::new(RmsNormConfig::new(8).init(&device()), Some(3));
        let x = leaf([1, local, 8], DType::F32);
        finite(&x, &norm.forward(x.clone(), |norm: &RmsNorm, x| norm.forward(x)).sum().backward());
        Ok(())
    })
}

fn tiled_loss(world: ProcessGroup) -> Result<()> {
    inside(&world, 8, |local| {
        let head = TiledLinearCrossEntropy::new(LinearConfig::new(8, 10).init(&device()), Some(3));
        let x = leaf([1, local, 8], DType::F32);
        let targets = Tensor::<2, Int>::ones([1, local], &Device::flex());
        let loss = head.forward(x.clone(), targets, None)?;
        finite(&x, &loss.mean.backward());
        Ok(())
    })
}

/// How well a runtime is known; where this build has it and the machine lets it start, it computes here.
fn standing(runtime: Runtime) -> &'static str {
    match DeviceChoice::first(runtime).open() {
        Ok(device) => {
            for ranks in [1, 2] {
                let device = Some(device.clone().autodiff());
                let probe = move |world| attend(world, Ask { heads: (4, 2), device: device.clone(), ..Ask::default() });
                launch(ranks, probe).unwrap_or_else(|error| panic!("{runtime} on {ranks} ranks: {error}"));
            }
        }
        Err(DeviceError::NotCompiled { .. }) => assert!(!runtime.is_compiled_in()),
        Err(error) => {
            assert!(matches!(error, DeviceError::NotStarted { .. }) && runtime != Runtime::Flex, "{error}");
            skipped("readme_is_true", &format!("{runtime} does not start here: {error}"));
        }
    }
    match runtime.standing() {
        Standing::Run => "run",
        Standing::Compiled => "compiled",
    }
}

/// What is to be done instead; empty if it works.
fn answer(ranks: usize, probe: Probe) -> String {
    match launch(ranks, probe) {
        Ok(_) => String::new(),
        Err(error) => remedy(&error).unwrap_or_else(|| panic!("not a refusal: {error}")),
    }
}

fn remedy(error: &LaunchError) -> Option<String> {
    match error.downcast_ref()? {
        Error::Invalid { remedy, .. } | Error::Unsupported { remedy, .. } => Some(remedy.clone()),
        _ => None,
    }
}

fn table() -> String {
    let mut table = "| | one rank | more ranks | instead |\n|---|---|---|---|\n".to_owned();
    for (heading, lines) in LINES {
        writeln!(table, "| **{heading}** | | | |").unwrap();
        for (what, probe) in lines {
            let answers = [1, 2].map(|ranks| answer(ranks, *probe));
            let [one, more] = answers.each_ref().map(|answer| if answer.is_empty() { "yes" } else { "no" });
            let instead = answers.iter().find(|answer| !answer.is_empty()).map_or("", String::as_str);
            writeln!(table, "| {what} | {one} | {more} | {instead} |").unwrap();
        }
    }
    writeln!(table, "| **devices** | | | needs |").unwrap();
    for runtime in Runtime::ALL {
        let standing = standing(runtime);
        writeln!(table, "| `--device {runtime}` | {standing} | {standing} | {} |", runtime.needs()).unwrap();
    }
    table
}

#[test]
fn the_support_table_is_what_the_code_answers() {
    let readme = include_str!("../README.md");
    let (_, rest) = readme.split_once("<!-- support -->\n").expect("the table's beginning");
    let (written, _) = rest.split_once("<!-- /support -->").expect("the table's end");
    let found = table();
    // Not vacuous: something works, something is refused.
    assert!(found.contains("| yes | yes |") && found.contains("| no | no |"));
    assert!(written == found, "README.md has another table between its support marks; the code answers\n\n{found}");
}
