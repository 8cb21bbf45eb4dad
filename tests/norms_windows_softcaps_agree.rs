//! Norms on heads, windows, softcaps and biases, each and together, give one device's outputs and gradients under every scheme.
//!
//! In f64, where sums in another order explain a thousandth of the tolerance.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::RmsNorm;
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::attention::SequenceContext;
use burn_context_parallel::sequence::{RotaryFrequencies, RotaryScaling, SequenceLayout, apply_rotary};
use burn_upipe::upipe::{AttentionScheme, UPipeAttention, UPipeAttentionConfig};
use rstest::rstest;
use tests::{assert_close, on_ranks, tensor, values};

const TOLERANCE: f64 = 1e-11;
const BATCH: usize = 2;
const SEQ: usize = 19;
const WIDTH: usize = 10;
const DIM: usize = 6;
const EPSILON: f64 = 1e-3;

/// What a module has beyond the plain one.
#[derive(Clone, Copy, Debug)]
struct Extras {
    qk_norm: bool,
    window: Option<usize>,
    softcap: Option<f64>,
    biases: (bool, bool),
}

const PLAIN: Extras = Extras { qk_norm: false, window: None, softcap: None, biases: (false, false) };
const ALL: Extras = Extras { qk_norm: true, window: Some(5), softcap: Some(1.5), biases: (true, true) };

/// All parameters random, so that heads, and gammas, can be told apart.
struct Fill(u64);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let seed = self.0;
        param.map(move |x| {
            let fresh = tensor::<D>(&values(seed, &x.dims()), DType::F64, &x.device());
            // Gammas about 1, as they are.
            let fresh = if D == 1 && x.dims()[0] == DIM { fresh * 0.4 + 1.0 } else { fresh * 0.4 };
            fresh.detach().require_grad()
        })
    }
}

fn rotary() -> RotaryFrequencies {
    RotaryFrequencies::scaled(DIM, 1e4, &RotaryScaling::yarn(8.0, 4)).unwrap()
}

fn attention(scheme: AttentionScheme, heads: (usize, usize), extras: Extras, device: &Device) -> UPipeAttention {
    let config = UPipeAttentionConfig::new(WIDTH, heads.0, heads.1, DIM)
        .with_qkv_bias(extras.biases.0)
        .with_output_bias(extras.biases.1)
        .with_qk_norm(extras.qk_norm.then_some(EPSILON))
        .with_window(extras.window)
        .with_softcap(extras.softcap);
    let module = config.init(device).unwrap().with_scheme(scheme).unwrap().with_rotary(rotary()).unwrap();
    module.map(&mut Fill(10))
}

/// Gradients of all parameters in visiting order; `None` where there is none.
fn gradients(module: &UPipeAttention, grads: &burn::tensor::Gradients) -> Vec<Option<TensorData>> {
    struct Collect<'a>(&'a burn::tensor::Gradients, Vec<Option<TensorData>>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.push(param.val().grad(self.0).map(|grad| grad.into_data()));
        }
    }
    let mut collect = Collect(grads, Vec::new());
    module.visit(&mut collect);
    collect.1
}

struct Answer {
    y: TensorData,
    dx: TensorData,
    grads: Vec<Option<TensorData>>,
}

fn run(
    module: &UPipeAttention,
    x: Tensor<3>,
    dy: Tensor<3>,
    context: &SequenceContext,
) -> burn_context_parallel::Result<Answer> {
    let x = x.detach().require_grad();
    let y = module.forward_in(x.clone(), context)?;
    let grads = (y.clone() * dy).sum().backward();
    Ok(Answer {
        y: y.inner().into_data(),
        dx: x.grad(&grads).expect("x is used").into_data(),
        grads: gradients(module, &grads),
    })
}

fn data() -> (TensorData, TensorData) {
    (values(1, &[BATCH, SEQ, WIDTH]), values(2, &[BATCH, SEQ, WIDTH]))
}

fn whole(data: &TensorData) -> Tensor<3> {
    tensor(data, DType::F64, &Device::flex().autodiff())
}

fn flat(data: &TensorData) -> Tensor<1> {
    let values: Vec<f64> = data.iter::<f64>().collect();
    tensor(&TensorData::new(values.clone(), [values.len()]), DType::F64, &Device::flex())
}

/// One device, written out: every score in memory, norms by the formula, Burn's autodiff.
fn written_out(heads: (usize, usize), extras: Extras) -> Answer {
    let device = Device::flex().autodiff();
    let module = attention(AttentionScheme::Single, heads, extras, &device);
    let (x, dy) = data();
    let (x, dy) = (whole(&x).require_grad(), whole(&dy));
    let table = rotary().table(&(0..SEQ as i64).collect::<Vec<_>>().repeat(BATCH), BATCH, DType::F64, &Device::flex());
    let norm = |x: Tensor<4>, norm: &Option<RmsNorm>| match norm {
        Some(norm) => {
            let rms = (x.clone().square().mean_dim(3) + norm.epsilon).sqrt();
            x / rms * norm.gamma.val().reshape([1, 1, 1, DIM])
        }
        None => x,
    };
    let project = |linear: &burn::nn::Linear, heads: usize| linear.forward(x.clone()).reshape([BATCH, SEQ, heads, DIM]);
    let q = apply_rotary(norm(project(&module.q_proj, heads.0), &module.q_norm), &table).swap_dims(1, 2);
    let k = apply_rotary(norm(project(&module.k_proj, heads.1), &module.k_norm), &table).swap_dims(1, 2);
    let v = project(&module.v_proj, heads.1).swap_dims(1, 2);
    // Query head h reads key/value head h / group.
    let repeat = |x: Tensor<4>| {
        let group = heads.0 / heads.1;
        let x = x.reshape([BATCH, heads.1, 1, SEQ * DIM]).repeat_dim(2, group);
        x.reshape([BATCH, heads.0, SEQ, DIM])
    };
    let mut scores = q.matmul(repeat(k).swap_dims(2, 3)) * (1.0 / (DIM as f64).sqrt());
    if let Some(cap) = extras.softcap {
        // Not divided: Burn differentiates a division by a number in f32.
        scores = (scores * (1.0 / cap)).tanh() * cap;
    }
    let unseen: Vec<f64> = (0..SEQ * SEQ)
        .map(|at| (at / SEQ, at % SEQ))
        .map(|(i, j)| if j <= i && extras.window.is_none_or(|window| i - j < window) { 0.0 } else { -1e30 })
        .collect();
    let unseen = tensor::<2>(&TensorData::new(unseen, [SEQ, SEQ]), DType::F64, &device);
    let weights = softmax(scores + unseen.reshape([1, 1, SEQ, SEQ]), 3);
    let out = weights.matmul(repeat(v)).swap_dims(1, 2).reshape([BATCH, SEQ, heads.0 * DIM]);
    let y = module.o_proj.forward(out);
    let grads = (y.clone() * dy).sum().backward();
    Answer {
        y: y.inner().into_data(),
        dx: x.grad(&grads).expect("x is used").into_data(),
        grads: gradients(&module, &grads),
    }
}

fn compare(case: &str, got: &Answer, want: &Answer) {
    assert_close(format!("{case}: y"), &flat(&got.y), &flat(&want.y), TOLERANCE);
    assert_close(format!("{case}: dx"), &flat(&got.dx), &flat(&want.dx), TOLERANCE);
    assert_eq!(got.grads.len(), want.grads.len());
    for (i, (got, want)) in got.grads.iter().zip(&want.grads).enumerate() {
        let (Some(got), Some(want)) = (got, want) else { panic!("{case}: gradient {i} is missing") };
        assert_close(format!("{case}: gradient {i}"), &flat(got), &flat(want), TOLERANCE);
    }
}

/// The answers of ranks as one: outputs side by side, gradients summed.
fn on(ranks: usize, scheme: AttentionScheme, heads: (usize, usize), extras: Extras, frozen: Option<usize>) -> Answer {
    let layout = SequenceLayout::contiguous(SEQ, ranks).unwrap();
    let of_ranks = layout.clone();
    let answers = on_ranks(ranks, move |world| {
        let context = SequenceContext::from_layout(&world, of_ranks.clone(), BATCH)?;
        let mine = |data: &TensorData| {
            let whole = tensor::<3>(data, DType::F64, &Device::flex());
            Tensor::from_inner(of_ranks.cut(&whole, 1, world.rank()))
        };
        let module = attention(scheme, heads, extras, &Device::flex().autodiff());
        let module = module.map(&mut Freeze { frozen, next: 0 });
        let (x, dy) = data();
        run(&module, mine(&x), mine(&dy), &context)
    });
    let join = |pick: fn(&Answer) -> &TensorData| {
        let parts: Vec<Tensor<3>> = answers.iter().map(|a| tensor(pick(a), DType::F64, &Device::flex())).collect();
        layout.assemble(&parts, 1).into_data()
    };
    let (y, dx) = (join(|a| &a.y), join(|a| &a.dx));
    let sum = |i: usize| {
        let parts: Vec<_> = answers.iter().filter_map(|a| a.grads[i].as_ref().map(flat)).collect();
        assert!(parts.is_empty() || parts.len() == ranks, "all ranks have gradient {i}, or none");
        parts.into_iter().reduce(|a, b| a + b).map(Tensor::into_data)
    };
    Answer { y, dx, grads: (0..answers[0].grads.len()).map(sum).collect() }
}

#[rstest]
fn each_and_all_are_one_device_written_out(
    #[values((4, 2), (6, 1), (9, 3), (3, 3))] heads: (usize, usize),
    #[values(
        PLAIN,
        Extras { qk_norm: true, ..PLAIN },
        Extras { window: Some(4), ..PLAIN },
        Extras { window: Some(2), ..PLAIN },
        Extras { softcap: Some(0.7), ..PLAIN },
        Extras { biases: (true, false), ..PLAIN },
        Extras { biases: (false, true), ..PLAIN },
        ALL
    )]
    extras: Extras,
) {
    let expected = written_out(heads, extras);
    let parameters = 4 + if extras.qk_norm { 2 } else { 0 };
    let biases = if extras.biases.0 { 3 } else { 0 } + usize::from(extras.biases.1);
    assert_eq!(expected.grads.len(), parameters + biases);
    for ranks in 1..=4 {
        let mut schemes = vec![AttentionScheme::Ulysses, AttentionScheme::default()];
        if ranks == 1 {
            schemes.push(AttentionScheme::Single);
        }
        schemes.extend((1..=heads.0).map(|u| AttentionScheme::UPipe { heads_per_stage: Some(u) }));
        for scheme in schemes {
            let got = on(ranks, scheme, heads, extras, None);
            compare(&format!("{heads:?} on {ranks}, {scheme:?}, {extras:?}"), &got, &expected);
        }
    }
}

/// Makes one parameter a constant.
struct Freeze {
    frozen: Option<usize>,
    next: usize,
}

impl ModuleMapper for Freeze {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.next += 1;
        if self.frozen == Some(self.next - 1) { param.set_require_grad(false) } else { param }
    }
}

/// Freezing one parameter (a weight, a bias, a gamma) leaves the gradients of all others as they were, and gives it none.
#[rstest]
fn a_frozen_parameter_changes_no_other_gradient(
    #[values(
        (1, AttentionScheme::Single),
        (2, AttentionScheme::Ulysses),
        (1, AttentionScheme::UPipe { heads_per_stage: Some(2) }),
        (2, AttentionScheme::UPipe { heads_per_stage: Some(2) })
    )]
    plan: (usize, AttentionScheme),
) {
    let expected = on(plan.0, plan.1, (6, 3), ALL, None);
    assert_eq!(expected.grads.len(), 10);
    for frozen in 0..10 {
        let got = on(plan.0, plan.1, (6, 3), ALL, Some(frozen));
        assert_eq!((&got.y, &got.dx), (&expected.y, &expected.dx));
        for (i, (got, want)) in got.grads.iter().zip(&expected.grads).enumerate() {
            assert_eq!(got.as_ref(), want.as_ref().filter(|_| i != frozen), "gradient {i} with {frozen} frozen");
        }
    }
}

#[rstest]
#[case(|config: UPipeAttentionConfig| config.with_qk_norm(Some(0.0)), "qk_norm")]
#[case(|config: UPipeAttentionConfig| config.with_qk_norm(Some(f64::NAN)), "qk_norm")]
#[case(|config: UPipeAttentionConfig| config.with_softcap(Some(-1.0)), "softcap")]
#[case(|config: UPipeAttentionConfig| config.with_window(Some(0)), "a window of 0")]
fn settings_of_no_sense_are_errors(
    #[case] change: fn(UPipeAttentionConfig) -> UPipeAttentionConfig,
    #[case] named: &str,
) {
    let error = change(UPipeAttentionConfig::new(8, 2, 1, 4)).init(&Device::flex()).unwrap_err().to_string();
    assert!(error.contains(named), "{error}");
}
