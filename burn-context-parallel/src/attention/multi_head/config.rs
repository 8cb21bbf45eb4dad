//! The configuration, and what of Burn's is another function.

use burn::config::Config;
use burn::nn::attention::MultiHeadAttentionConfig;
use burn::nn::{Initializer, LinearConfig};
use burn::tensor::Device;

use super::{FlashMultiHeadAttention, NAME, Settings};
use crate::flash::FlashOptions;
use crate::{Error, Result};

/// Configuration of [`FlashMultiHeadAttention`].
#[derive(Config, Debug)]
pub struct FlashMultiHeadAttentionConfig {
    /// Model width E.
    pub d_model: usize,
    /// Heads H; they divide E.
    pub n_heads: usize,
    /// Whether a query sees only keys up to its own position.
    #[config(default = false)]
    pub causal: bool,
    /// Factor on scores; 1 / sqrt(D) if absent.
    pub scale: Option<f64>,
    /// How many positions a query looks back on, its own included.
    pub window: Option<usize>,
    /// How many positions a query looks ahead.
    pub lookahead: Option<usize>,
    /// The largest score.
    pub softcap: Option<f64>,
    /// How weights and biases are drawn, as in Burn's module.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/f64::sqrt(3.0), fan_out_only:false}")]
    pub initializer: Initializer,
    /// A bias on the key projection.
    #[config(default = true)]
    pub key_bias: bool,
    /// A bias on the value projection.
    #[config(default = true)]
    pub value_bias: bool,
    /// A bias on the query projection.
    #[config(default = true)]
    pub query_bias: bool,
    /// A bias on the output projection.
    #[config(default = true)]
    pub output_bias: bool,
}

impl FlashMultiHeadAttentionConfig {
    /// The configuration of the same function.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for dropout, quiet softmax, and a `min_float` that leaves masked keys some weight.
    pub fn from_burn(config: &MultiHeadAttentionConfig) -> Result<Self> {
        expect_the_same_function(config.dropout, config.quiet_softmax, config.min_float)?;
        Ok(Self::new(config.d_model, config.n_heads)
            .with_initializer(config.initializer.clone())
            .with_key_bias(config.key_bias)
            .with_value_bias(config.value_bias)
            .with_query_bias(config.query_bias)
            .with_output_bias(config.output_bias))
    }

    /// The module, on `device`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a count is zero, H does not divide E, or an option describes no attention (a window of 0, a scale or a
    /// softcap that is no number).
    pub fn init(&self, device: &Device) -> Result<FlashMultiHeadAttention> {
        expect_counts(self.d_model, self.n_heads)?;
        let mut options = if self.causal { FlashOptions::causal() } else { FlashOptions::full() };
        (options.scale, options.window) = (self.scale, self.window);
        (options.lookahead, options.softcap) = (self.lookahead, self.softcap);
        options.check(NAME)?;
        let linear = |bias: bool| {
            let config = LinearConfig::new(self.d_model, self.d_model).with_bias(bias);
            config.with_initializer(self.initializer.clone()).init(device)
        };
        Ok(FlashMultiHeadAttention {
            query: linear(self.query_bias),
            key: linear(self.key_bias),
            value: linear(self.value_bias),
            output: linear(self.output_bias),
            settings: Settings { d_model: self.d_model, n_heads: self.n_heads, options },
        })
    }
}

pub(super) fn expect_counts(d_model: usize, n_heads: usize) -> Result<()> {
    // Weights of this many elements can be addressed.
    let fits = d_model.checked_mul(d_model).is_some_and(|count| count <= isize::MAX as usize / size_of::<f64>());
    if d_model == 0 || n_heads == 0 || !d_model.is_multiple_of(n_heads) || !fits {
        return Err(Error::invalid(
            NAME,
            format!("d_model {d_model}, n_heads {n_heads}"),
            "make d_model a multiple of n_heads, both positive",
        ));
    }
    Ok(())
}

/// Refuses what Burn's module computes and this one does not.
pub(super) fn expect_the_same_function(dropout: f64, quiet_softmax: bool, min_float: f64) -> Result<()> {
    if dropout != 0.0 {
        return Err(Error::unsupported(
            NAME,
            format!("dropout of {dropout} on attention weights, which never exist,"),
            "set it to 0 (config.with_dropout(0.0), or module.dropout.prob = 0.0) and put a Dropout after attention",
        ));
    }
    if quiet_softmax {
        return Err(Error::unsupported(NAME, "quiet_softmax", "use quiet_softmax = false, or stay with Burn's module"));
    }
    // exp(-1000) beside ordinary scores is 0 in f64, too.
    if min_float.is_nan() || min_float > -1e3 {
        return Err(Error::unsupported(
            NAME,
            format!("min_float of {min_float}, with which masked keys keep weight,"),
            "use -1000 or less (Burn's default is -10000): masked keys are hidden here",
        ));
    }
    Ok(())
}
