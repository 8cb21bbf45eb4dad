//! The attention module: U-Pipe, plain Ulysses or one device, by configuration.

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Tensor};
use burn_context_parallel::attention::{SequenceContext, current, ulysses};
use burn_context_parallel::flash::{FlashOptions, flash_attention};
use burn_context_parallel::sequence::{RotaryFrequencies, apply_rotary};
use burn_context_parallel::{Error, OrRaise, Result, phase};

use super::{HeadNorm, Projection, ProjectionWeights, Schedule, upipe};

const NAME: &str = "UPipeAttention";

/// How attention runs; the result is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionScheme {
    /// The whole sequence on one device.
    Single,
    /// All heads at once, over the ranks of the scope.
    Ulysses,
    /// Head group by head group, over the ranks of the scope.
    UPipe {
        /// Query heads (over all ranks) a stage, U: 1 to H; `None` takes [`Schedule::default_per_stage`], and runs as Ulysses where that would
        /// be a single stage, on H ranks or more.
        heads_per_stage: Option<usize>,
    },
}

impl Default for AttentionScheme {
    fn default() -> Self {
        Self::UPipe { heads_per_stage: None }
    }
}

/// Configuration of [`UPipeAttention`].
#[derive(Config, Debug)]
pub struct UPipeAttentionConfig {
    /// Model width E.
    pub d_model: usize,
    /// Query heads H.
    pub heads: usize,
    /// Key/value heads G, a divisor of H.
    pub kv_heads: usize,
    /// Head dimension D; H * D need not be E.
    pub head_dim: usize,
    /// Biases on the q, k and v projections.
    #[config(default = false)]
    pub qkv_bias: bool,
    /// Bias on the output projection.
    #[config(default = false)]
    pub output_bias: bool,
    /// Whether a token sees only what came before it.
    #[config(default = true)]
    pub causal: bool,
    /// Factor on scores; 1 / sqrt(D) if absent.
    pub scale: Option<f64>,
    /// Norms on each head of q and k before they are rotated (Qwen3), with this epsilon; none if absent.
    pub qk_norm: Option<f64>,
    /// How many tokens a token looks back on, itself included (a sliding window); all if absent.
    pub window: Option<usize>,
    /// How many tokens a token looks ahead, if not causal; all if absent.
    pub lookahead: Option<usize>,
    /// Bends scores to stay below this: `cap tanh(s / cap)`; not at all if absent.
    pub softcap: Option<f64>,
}

/// Self-attention over a sequence that may lie on many ranks, with rotary positions.
///
/// ```text
/// y = concat_h(softmax(scale q_h k_h^T) v_h) Wo,  q_h = rotary(norm(x Wq_h)), k_h = rotary(norm(x Wk_h)), v_h = x Wv_h
/// ```
///
/// Biases, norms, rotary positions, a window and a softcap are each there or not.
///
/// The sequence is the one of the [scope](burn_context_parallel::attention::ContextParallel::scope) in which it is called, or of the context
/// given to [`forward_in`](Self::forward_in); outside any scope the input is a whole sequence from position 0.
#[derive(Module, Debug)]
pub struct UPipeAttention {
    /// [E, H * D].
    pub q_proj: Linear,
    /// [E, G * D].
    pub k_proj: Linear,
    /// [E, G * D].
    pub v_proj: Linear,
    /// [H * D, E].
    pub o_proj: Linear,
    /// On each query head, `[D]`.
    pub q_norm: Option<RmsNorm>,
    /// On each key head, `[D]`.
    pub k_norm: Option<RmsNorm>,
    #[module(skip)]
    settings: Settings,
}

#[derive(Clone, Debug)]
struct Settings {
    /// E. Not from a weight's shape, which is that of a shard where weights are sharded.
    width: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    options: FlashOptions,
    rotary: Option<RotaryFrequencies>,
    scheme: AttentionScheme,
}

impl UPipeAttentionConfig {
    /// The module, on `device`, without rotary positions and with the default scheme.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a count is zero, G does not divide H, the scale is not a number, or the norms' epsilon or the softcap is
    /// not a positive one.
    pub fn init(&self, device: &Device) -> Result<UPipeAttention> {
        if self.d_model == 0 || self.head_dim == 0 {
            return Err(Error::invalid(
                NAME,
                format!("d_model {}, head_dim {}", self.d_model, self.head_dim),
                "make both positive",
            ));
        }
        Schedule::new(self.heads, self.kv_heads, 1, self.heads.max(1))?;
        // Weights of this many elements can be addressed.
        let elements = self.heads.checked_mul(self.head_dim).and_then(|width| width.checked_mul(self.d_model));
        if elements.is_none_or(|count| count > isize::MAX as usize / size_of::<f64>()) {
            return Err(Error::invalid(
                NAME,
                format!("d_model {}, {} heads of {}", self.d_model, self.heads, self.head_dim),
                "make them smaller: no memory holds such weights",
            ));
        }
        if self.qk_norm.is_some_and(|epsilon| !(epsilon.is_finite() && epsilon > 0.0)) {
            return Err(Error::invalid(NAME, format!("qk_norm {:?}", self.qk_norm), "use a positive number, or None"));
        }
        let linear = |from: usize, to: usize, bias: bool| LinearConfig::new(from, to).with_bias(bias).init(device);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut options = if self.causal { FlashOptions::causal() } else { FlashOptions::full() };
        (options.scale, options.softcap) = (self.scale, self.softcap);
        (options.window, options.lookahead) = (self.window, self.lookahead);
        options.expect_lengths(NAME, 1, 1)?;
        let norm = || self.qk_norm.map(|epsilon| RmsNormConfig::new(self.head_dim).with_epsilon(epsilon).init(device));
        Ok(UPipeAttention {
            q_proj: linear(self.d_model, q, self.qkv_bias),
            k_proj: linear(self.d_model, kv, self.qkv_bias),
            v_proj: linear(self.d_model, kv, self.qkv_bias),
            o_proj: linear(q, self.d_model, self.output_bias),
            q_norm: norm(),
            k_norm: norm(),
            settings: Settings {
                width: self.d_model,
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
                options,
                rotary: None,
                scheme: AttentionScheme::default(),
            },
        })
    }
}

impl UPipeAttention {
    /// Adds rotary positions.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the frequencies are for another head dimension.
    pub fn with_rotary(mut self, frequencies: RotaryFrequencies) -> Result<Self> {
        if frequencies.head_dim() != self.settings.head_dim {
            return Err(Error::invalid(
                NAME,
                format!(
                    "rotary frequencies for head_dim {}, heads of {}",
                    frequencies.head_dim(),
                    self.settings.head_dim
                ),
                "make them for the same head_dim",
            ));
        }
        self.settings.rotary = Some(frequencies);
        Ok(self)
    }

    /// Chooses how attention runs.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the heads per stage are not in 1..=H.
    pub fn with_scheme(mut self, scheme: AttentionScheme) -> Result<Self> {
        if let AttentionScheme::UPipe { heads_per_stage: Some(heads_per_stage) } = scheme {
            Schedule::new(self.settings.heads, self.settings.kv_heads, 1, heads_per_stage)?;
        }
        self.settings.scheme = scheme;
        Ok(self)
    }

    /// The stages that `ranks` ranks walk, for printing; one stage unless the scheme is U-Pipe.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there are no ranks.
    pub fn schedule(&self, ranks: usize) -> Result<Schedule> {
        let Settings { heads, kv_heads, .. } = self.settings;
        let per_stage = match self.settings.scheme {
            AttentionScheme::Single | AttentionScheme::Ulysses => heads,
            AttentionScheme::UPipe { heads_per_stage } => {
                heads_per_stage.unwrap_or_else(|| Schedule::default_per_stage(heads, ranks))
            }
        };
        Schedule::new(heads, kv_heads, ranks, per_stage)
    }

    /// Attention over the sequence at hand.
    ///
    /// # Shapes
    ///
    /// [B, L, E] -> [B, L, E].
    ///
    /// # Panics
    ///
    /// [Raises](burn_context_parallel::raise) what [`forward_in`](Self::forward_in) returns as an error.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let context = match current() {
            Some(context) => context,
            None => SequenceContext::single(x.dims()[1], x.dims()[0]).or_raise(),
        };
        self.forward_in(x, &context).or_raise()
    }

    /// Attention over the sequence of `context`.
    ///
    /// # Shapes
    ///
    /// [B, L, E] -> [B, L, E], L this rank's tokens.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `x` is not this rank's shard, or the scheme is for one device and the group is larger;
    /// [`Error::Group`] if another rank fails.
    ///
    /// # Memory
    ///
    /// Under U-Pipe as [`upipe`](super::upipe()); under Ulysses and on one device q, k, v and out are whole.
    pub fn forward_in(&self, x: Tensor<3>, context: &SequenceContext) -> Result<Tensor<3>> {
        let [batch, local, width] = x.dims();
        context.expect(NAME, batch, local)?;
        let expected = self.settings.width;
        if width != expected {
            return Err(Error::invalid(
                NAME,
                format!("an input of shape {:?} for weights of width {expected}", x.dims()),
                format!("pass [B, L, {expected}]"),
            ));
        }
        if self.settings.scheme == AttentionScheme::Single && context.group().size() > 1 {
            return Err(Error::invalid(
                NAME,
                format!("AttentionScheme::Single in a group of {} ranks", context.group().size()),
                "use Ulysses or UPipe, or give one rank the whole sequence",
            ));
        }
        let Settings { heads, head_dim, .. } = self.settings;
        phase::try_around("attention", None, x, |x| {
            let out = match self.settings.scheme {
                AttentionScheme::Single | AttentionScheme::Ulysses => self.whole(x, context)?,
                AttentionScheme::UPipe { heads_per_stage: None }
                    if Schedule::is_single_by_default(heads, context.group().size()) =>
                {
                    self.whole(x, context)?
                }
                AttentionScheme::UPipe { .. } => self.staged(x, context)?,
            };
            Ok(self.o_proj.forward(out.reshape([batch, local, heads * head_dim])))
        })
    }

    /// q, k, v as wholes: [B, L, H, D].
    fn whole(&self, x: Tensor<3>, context: &SequenceContext) -> Result<Tensor<4>> {
        let Settings { heads, kv_heads, head_dim, options, rotary, .. } = &self.settings;
        let [batch, local, _] = x.dims();
        let project =
            |linear: &Linear, heads: usize| linear.forward(x.clone()).reshape([batch, local, heads, *head_dim]);
        let norm = |x: Tensor<4>, norm: &Option<RmsNorm>| match norm {
            Some(norm) => HeadNorm::of(norm).apply(x),
            None => x,
        };
        let mut q = norm(project(&self.q_proj, *heads), &self.q_norm);
        let mut k = norm(project(&self.k_proj, *kv_heads), &self.k_norm);
        let v = project(&self.v_proj, *kv_heads);
        drop(x);
        if let Some(frequencies) = rotary {
            let table = context.rotary(frequencies, q.dtype(), &q.device());
            q = apply_rotary(q, &table);
            k = apply_rotary(k, &table);
        }
        let (q, k, v) = (q.swap_dims(1, 2), k.swap_dims(1, 2), v.swap_dims(1, 2));
        let options = &context.bound(options)?;
        let out = if context.group().size() == 1 {
            flash_attention(q, k, v, options)?
        } else {
            ulysses(q, k, v, options, context.group(), context.layout(), context.layout())?
        };
        Ok(out.swap_dims(1, 2))
    }

    /// A stage's heads at a time: [B, L, H, D].
    fn staged(&self, x: Tensor<3>, context: &SequenceContext) -> Result<Tensor<4>> {
        let Settings { head_dim, options, rotary, .. } = &self.settings;
        let schedule = self.schedule(context.group().size())?;
        let table = rotary.as_ref().map(|frequencies| context.rotary(frequencies, x.dtype(), &x.device()));
        let bias = |linear: &Linear| linear.bias.as_ref().map(|bias| bias.val());
        let weights = ProjectionWeights {
            q: self.q_proj.weight.val(),
            k: self.k_proj.weight.val(),
            v: self.v_proj.weight.val(),
            biases: [bias(&self.q_proj), bias(&self.k_proj), bias(&self.v_proj)],
            norms: [&self.q_norm, &self.k_norm].map(|norm| norm.as_ref().map(HeadNorm::of)),
        };
        let (source, inputs) = Projection::new(x, weights, *head_dim, table);
        upipe(source, inputs, &schedule, options, context)
    }
}
