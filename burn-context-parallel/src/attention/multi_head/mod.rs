//! Multi-head attention with the parameters of Burn's, and without its [B, H, Sq, Sk] weights.
//!
//! B batch, Sq queries, Sk keys, E model width, H heads, D = E / H.

mod config;
mod input;

use burn::module::Module;
use burn::nn::Linear;
use burn::nn::attention::MultiHeadAttention;
use burn::tensor::Tensor;

use super::{SequenceContext, current, ulysses};
use crate::flash::{FlashOptions, flash_attention, reference};
use crate::group::ProcessGroup;
use crate::sequence::{Documents, NO_DOCUMENT, PerToken, SequenceLayout};
use crate::vjp::beside;
use crate::{Error, OrRaise, Result};

pub use config::FlashMultiHeadAttentionConfig;
pub use input::FlashMhaInput;

use config::{expect_counts, expect_the_same_function};
use input::{gathered, rows};

const NAME: &str = "FlashMultiHeadAttention";

/// Multi-head attention, self or cross, with the parameters of `burn::nn`'s `MultiHeadAttention`: a record of either loads into the
/// other.
///
/// ```text
/// y = concat_h(softmax(scale q_h k_h^T) v_h) Wo + bo,  q = query Wq + bq,  k = key Wk + bk,  v = value Wv + bv
/// ```
///
/// Burn's forward computes all weights [B, H, Sq, Sk] and returns them; here they never exist. Inside a
/// [scope](super::ContextParallel::scope) self-attention runs across the ranks that share the sequence.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::attention::MultiHeadAttentionConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_context_parallel::attention::{FlashMhaInput, FlashMultiHeadAttention};
///
/// let device = Device::flex();
/// let trained = MultiHeadAttentionConfig::new(32, 4).with_dropout(0.0).init(&device);
/// let attention = FlashMultiHeadAttention::from_burn(trained.clone())?.with_causal(true);
///
/// let x = Tensor::<3>::random([2, 100, 32], Distribution::Default, &device);
/// assert_eq!(attention.forward(FlashMhaInput::self_attn(x)).dims(), [2, 100, 32]);
/// // The weights go back the same way.
/// let trained = trained.load_record(attention.into_record());
///
/// // What would be another function is refused.
/// let dropping = MultiHeadAttentionConfig::new(32, 4).with_dropout(0.1).init(&device);
/// assert!(FlashMultiHeadAttention::from_burn(dropping).unwrap_err().to_string().contains("dropout"));
/// # let _ = trained;
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
///
/// # References
///
/// Attention is all you need, arXiv 1706.03762.
#[derive(Module, Debug)]
pub struct FlashMultiHeadAttention {
    /// [E, E].
    pub query: Linear,
    /// [E, E].
    pub key: Linear,
    /// [E, E].
    pub value: Linear,
    /// [E, E].
    pub output: Linear,
    #[module(skip)]
    settings: Settings,
}

#[derive(Clone, Debug)]
struct Settings {
    d_model: usize,
    n_heads: usize,
    options: FlashOptions,
}

impl FlashMultiHeadAttention {
    /// Burn's module, with its own parameters: ids and all.
    ///
    /// Burn's sees every key unless a mask hides it; where the mask was the autoregressive one, add
    /// [`with_causal`](Self::with_causal).
    ///
    /// # Errors
    ///
    /// As [`FlashMultiHeadAttentionConfig::from_burn`]; [`Error::Invalid`] if the projections are not [E, E].
    pub fn from_burn(module: MultiHeadAttention) -> Result<Self> {
        expect_the_same_function(module.dropout.prob, module.quiet_softmax, module.min_float)?;
        let (d_model, n_heads) = (module.d_model, module.n_heads);
        expect_counts(d_model, n_heads)?;
        let linears = [&module.query, &module.key, &module.value, &module.output];
        for (name, linear) in ["query", "key", "value", "output"].iter().zip(linears) {
            let shape = linear.weight.lazy_shape();
            if shape.as_slice() != [d_model, d_model] {
                return Err(Error::invalid(
                    NAME,
                    format!("the {name} projection is {:?} in a module of width {d_model}", shape.as_slice()),
                    format!("all four are [{d_model}, {d_model}]"),
                ));
            }
        }
        Ok(Self {
            query: module.query,
            key: module.key,
            value: module.value,
            output: module.output,
            settings: Settings { d_model, n_heads, options: FlashOptions::full() },
        })
    }

    /// Whether a query sees only keys up to its own position.
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.settings.options.causal = causal;
        self
    }

    /// Other options: causal, scale, window, lookahead, softcap.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if an option describes no attention, or belongs to a batch and not to a module: offsets, positions,
    /// documents.
    pub fn with_options(mut self, options: FlashOptions) -> Result<Self> {
        options.check(NAME)?;
        let of_batch = options.documents.is_some() || options.positions.is_some();
        if of_batch || (options.q_offset, options.k_offset) != (0, 0) {
            return Err(Error::invalid(
                NAME,
                "a module's options with documents, positions or offsets",
                "give documents with the batch (Batch::with_documents, FlashMhaInput::documents); keys end where queries end",
            ));
        }
        self.settings.options = options;
        Ok(self)
    }

    /// The options of every call.
    pub fn options(&self) -> &FlashOptions {
        &self.settings.options
    }

    /// Attention of the queries over the keys; in a scope, over the whole sequence.
    ///
    /// As in Burn's `attention`, causal and windows are aligned at the end: query i is at the position of key `i + (Sk - Sq)`.
    ///
    /// # Shapes
    ///
    /// query [B, Sq, E], key and value [B, Sk, E] -> [B, Sq, E]. In a scope, Sq and Sk are the shard's length.
    ///
    /// # Panics
    ///
    /// [Raises](crate::raise) what [`try_forward`](Self::try_forward) returns as an error.
    pub fn forward(&self, input: FlashMhaInput) -> Tensor<3> {
        self.try_forward(input).or_raise()
    }

    /// [`forward`](Self::forward), with its errors as values.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for `mask_attn` (never ignored); [`Error::Invalid`] for shapes that do not fit each other or the
    /// scope; [`Error::Group`] if another rank fails.
    ///
    /// # Memory
    ///
    /// Kept for the backward pass, beside the inputs: q, k, v and the output [B, S, E], 4 bytes a query and head. In a scope as
    /// [`ulysses`].
    pub fn try_forward(&self, input: FlashMhaInput) -> Result<Tensor<3>> {
        if let Some(context) = current() {
            return self.forward_in(input, &context);
        }
        let [batch, q_len, k_len] = self.expect_input(&input)?;
        let padded = input.mask_pad.map(|mask| rows(mask.inner().int(), batch));
        let options = self.options_for(input.documents, padded, batch, q_len, k_len)?;
        let (q, k, v) = self.project(input.query, input.key, input.value);
        Ok(self.join(flash_attention(q, k, v, &options)?))
    }

    /// [`try_forward`](Self::try_forward) over the sequence of `context`.
    ///
    /// # Errors
    ///
    /// As [`try_forward`](Self::try_forward).
    ///
    /// # Communication
    ///
    /// As [`ulysses`]; with a padding mask, 4 or 8 bytes (an integer) a token to every other rank.
    pub fn forward_in(&self, mut input: FlashMhaInput, context: &SequenceContext) -> Result<Tensor<3>> {
        let [batch, q_len, k_len] = self.expect_input(&input)?;
        context.expect(NAME, batch, q_len)?;
        if k_len != q_len {
            return Err(Error::invalid(
                NAME,
                format!("keys of {k_len} tokens in the scope of a sequence of which this rank holds {q_len}"),
                "for keys of another sequence call forward_cross_in, which takes how both lie on the ranks",
            ));
        }
        input.documents = context.documents_or(NAME, input.documents)?;
        self.forward_cross_in(input, context.group(), context.layout(), context.layout())
    }

    /// Attention over keys of another sequence, which lies on the same ranks: an encoder's output, say.
    ///
    /// # Shapes
    ///
    /// query [B, L, E], key and value [B, L', E], L and L' this rank's lengths in the layouts -> [B, L, E].
    ///
    /// # Errors
    ///
    /// As [`try_forward`](Self::try_forward), and [`Error::Invalid`] if layouts, shapes and group do not fit.
    ///
    /// # Communication
    ///
    /// As [`forward_in`](Self::forward_in).
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_context_parallel::attention::{FlashMhaInput, FlashMultiHeadAttentionConfig};
    /// use burn_context_parallel::group::launch;
    /// use burn_context_parallel::sequence::SequenceLayout;
    ///
    /// launch(2, |group| {
    ///     let device = Device::flex();
    ///     let attention = FlashMultiHeadAttentionConfig::new(8, 2).init(&device)?;
    ///     let (answers, document) = (SequenceLayout::contiguous(6, 2)?, SequenceLayout::contiguous(100, 2)?);
    ///     let (query, key) = (Tensor::ones([1, 3, 8], &device), Tensor::<3>::ones([1, 50, 8], &device));
    ///     let input = FlashMhaInput::new(query, key.clone(), key);
    ///     let out = attention.forward_cross_in(input, &group, &answers, &document)?;
    ///     assert_eq!(out.dims(), [1, 3, 8]);
    ///     Ok::<_, burn_context_parallel::Error>(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_cross_in(
        &self,
        input: FlashMhaInput,
        group: &ProcessGroup,
        q_layout: &SequenceLayout,
        kv_layout: &SequenceLayout,
    ) -> Result<Tensor<3>> {
        let [batch, ..] = self.expect_input(&input)?;
        let padded = match input.mask_pad {
            None => None,
            Some(mask) => Some(gathered(mask, batch, group, kv_layout)?),
        };
        let options = self.options_for(input.documents, padded, batch, q_layout.len(), kv_layout.len())?;
        let (q, k, v) = self.project(input.query, input.key, input.value);
        Ok(self.join(ulysses(q, k, v, &options, group, q_layout, kv_layout)?))
    }

    /// [`forward`](Self::forward) with any `mask_attn`, every score in memory: for masks that no option describes, on one device.
    ///
    /// # Errors
    ///
    /// As [`try_forward`](Self::try_forward), but for the mask; [`Error::Unsupported`] in a scope of several ranks.
    ///
    /// # Memory
    ///
    /// O(B H Sq Sk), as [`reference::dense_attention`].
    pub fn forward_dense(&self, mut input: FlashMhaInput) -> Result<Tensor<3>> {
        const DENSE: &str = "FlashMultiHeadAttention::forward_dense";
        let mask = input.mask_attn.take();
        let [batch, q_len, k_len] = self.expect_input(&input)?;
        if let Some(ranks) = current().map(|context| context.group().size()).filter(|ranks| *ranks > 1) {
            return Err(Error::unsupported(
                DENSE,
                format!("a dense mask over {ranks} ranks"),
                "call it outside the scope, or describe the mask by causal, window, lookahead and documents",
            ));
        }
        if let Some(dims) = mask.as_ref().map(Tensor::dims).filter(|dims| *dims != [batch, q_len, k_len]) {
            return Err(Error::invalid(
                DENSE,
                format!("mask_attn is {dims:?}"),
                format!("give {:?}", [batch, q_len, k_len]),
            ));
        }
        if let Some(context) = current() {
            context.expect(DENSE, batch, q_len)?;
            context.expect(DENSE, batch, k_len)?;
            input.documents = context.documents_or(DENSE, input.documents)?;
        }
        let padded = input.mask_pad.map(|mask| rows(mask.inner().int(), batch));
        let options = self.options_for(input.documents, padded, batch, q_len, k_len)?;
        let (q, k, v) = self.project(input.query, input.key, input.value);
        let mask = mask.map(|mask| beside(mask.unsqueeze_dim::<4>(1), &q));
        Ok(self.join(reference::dense_attention(q, k, v, mask, None, &options)?))
    }

    /// Whatever can be wrong with the tensors; else B, and this rank's queries and keys.
    fn expect_input(&self, input: &FlashMhaInput) -> Result<[usize; 3]> {
        let width = self.settings.d_model;
        let (q, k, v) = (input.query.dims(), input.key.dims(), input.value.dims());
        if q[2] != width || k[2] != width || v != k || q[0] != k[0] || q[0] * q[1] * k[1] == 0 {
            return Err(Error::invalid(
                NAME,
                format!("query {q:?}, key {k:?}, value {v:?}"),
                format!("give query [B, Sq, {width}], key and value [B, Sk, {width}], none of them empty"),
            ));
        }
        if input.mask_attn.is_some() {
            return Err(Error::unsupported(
                NAME,
                "a dense mask, which takes O(S^2) memory,",
                "describe it by causal, window, lookahead, documents and mask_pad; or ask for O(S^2) by name, forward_dense or \
                 flash::reference::dense_attention on one device",
            ));
        }
        if let Some(dims) = input.mask_pad.as_ref().map(Tensor::dims).filter(|dims| *dims != k[..2]) {
            return Err(Error::invalid(
                NAME,
                format!("mask_pad is {dims:?} beside keys of shape {k:?}"),
                "give one value per key, true where it is padding",
            ));
        }
        Ok([q[0], q[1], k[1]])
    }

    /// The module's options with what a call brings: ends aligned, documents, padded keys.
    fn options_for(
        &self,
        documents: Option<(Documents, Documents)>,
        padded: Option<Vec<Vec<i64>>>,
        batch: usize,
        q_len: usize,
        k_len: usize,
    ) -> Result<FlashOptions> {
        let mut options = self.settings.options.clone().with_offsets(k_len as i64 - q_len as i64, 0);
        options.documents = documents;
        options.check_lengths(NAME, batch, q_len, k_len)?;
        let Some(padded) = padded else {
            return Ok(options);
        };
        let whole = |len: usize| Documents::from_ids(PerToken::shared(vec![0; len]));
        let (queries, keys) = options.documents.take().unwrap_or_else(|| (whole(q_len), whole(k_len)));
        let hide = |(row, padded): (usize, &Vec<i64>)| -> Vec<i64> {
            let ids = keys.row(row).iter().zip(padded);
            ids.map(|(id, padded)| if *padded == 0 { *id } else { NO_DOCUMENT }).collect()
        };
        let seen: Vec<Vec<i64>> = padded.iter().enumerate().map(hide).collect();
        Ok(options.with_cross_documents(queries, Documents::from_ids(PerToken::per_row(&seen)?)))
    }

    fn project(&self, query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
        let Settings { d_model, n_heads, .. } = self.settings;
        let heads = |linear: &Linear, x: Tensor<3>| {
            let [batch, len, _] = x.dims();
            linear.forward(x).reshape([batch, len, n_heads, d_model / n_heads]).swap_dims(1, 2)
        };
        (heads(&self.query, query), heads(&self.key, key), heads(&self.value, value))
    }

    fn join(&self, out: Tensor<4>) -> Tensor<3> {
        let [batch, _, len, _] = out.dims();
        self.output.forward(out.swap_dims(1, 2).reshape([batch, len, self.settings.d_model]))
    }
}
