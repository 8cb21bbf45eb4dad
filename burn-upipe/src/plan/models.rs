//! Shapes of published models, as their `config.json` has them.

use super::{ModelShape, PlanError};

/// The models that are known by name.
pub const MODELS: [&str; 10] = [
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
];

/// A published model's shape. Spelling is free: `Llama3-8B`, `meta-llama/Meta-Llama-3-8B-Instruct`, and `llama-3.1-8b`, which has the
/// same shape, are all `llama-3-8b`.
///
/// # Errors
///
/// [`PlanError::Invalid`] with the names that are known.
///
/// ```
/// use burn_upipe::plan::model;
///
/// assert_eq!(model("llama-3-8b")?.parameters(), 8_030_261_248);
/// assert_eq!(model("meta-llama/Meta-Llama-3-8B-Instruct")?, model("llama-3-8b")?);
/// assert!(model("llama-9-8b").unwrap_err().to_string().contains("qwen3-32b"));
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn model(name: &str) -> Result<ModelShape, PlanError> {
    let wanted = plain(name);
    // 3.1 (and 3.3) are of 3's shape.
    let wanted = match wanted.as_str() {
        "llama318b" => "llama38b".to_owned(),
        "llama3170b" | "llama3370b" => "llama370b".to_owned(),
        _ => wanted,
    };
    let known = MODELS.into_iter().find(|known| plain(known) == wanted).ok_or_else(|| {
        PlanError::invalid(
            format!("no model is called {name:?}"),
            format!("use {}, or the path of a config.json", MODELS.join(", ")),
        )
    })?;
    //                            vocab    width  inner  layers heads kv dim tied
    Ok(match known {
        "llama-3-8b" => llama(known, [128_256, 4096, 14336, 32, 32, 8, 128], false),
        "llama-3-70b" => llama(known, [128_256, 8192, 28672, 80, 64, 8, 128], false),
        "llama-3.2-1b" => llama(known, [128_256, 2048, 8192, 16, 32, 8, 64], true),
        "llama-3.2-3b" => llama(known, [128_256, 3072, 8192, 28, 24, 8, 128], true),
        "qwen3-0.6b" => qwen3(known, [151_936, 1024, 3072, 28, 16, 8, 128], true),
        "qwen3-1.7b" => qwen3(known, [151_936, 2048, 6144, 28, 16, 8, 128], true),
        "qwen3-4b" => qwen3(known, [151_936, 2560, 9728, 36, 32, 8, 128], true),
        "qwen3-8b" => qwen3(known, [151_936, 4096, 12288, 36, 32, 8, 128], false),
        "qwen3-14b" => qwen3(known, [151_936, 5120, 17408, 40, 40, 8, 128], false),
        _ => qwen3(known, [151_936, 5120, 25600, 64, 64, 8, 128], false),
    })
}

/// Letters and digits of the last part, without what says that a model was tuned.
fn plain(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name).to_ascii_lowercase();
    let letters: String = last.chars().filter(char::is_ascii_alphanumeric).collect();
    let letters = letters.strip_prefix("meta").unwrap_or(&letters);
    ["instruct", "base", "chat"].iter().fold(letters, |name, end| name.strip_suffix(end).unwrap_or(name)).to_owned()
}

fn llama(name: &str, [vocab, width, inner, layers, heads, kv_heads, head_dim]: [usize; 7], tied: bool) -> ModelShape {
    ModelShape {
        name: name.to_owned(),
        vocab,
        width,
        inner,
        layers,
        heads,
        kv_heads,
        head_dim,
        tied,
        qkv_bias: false,
        qk_norm: false,
    }
}

fn qwen3(name: &str, sizes: [usize; 7], tied: bool) -> ModelShape {
    ModelShape { qk_norm: true, ..llama(name, sizes, tied) }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// What their files of weights add up to, less a tied output layer where a file has it once more.
    #[rstest]
    #[case("llama-3-8b", 8_030_261_248)]
    #[case("llama-3-70b", 70_553_706_496)]
    #[case("llama-3.2-1b", 1_235_814_400)]
    #[case("llama-3.2-3b", 3_212_749_824)]
    #[case("qwen3-0.6b", 751_632_384 - 151_936 * 1024)]
    #[case("qwen3-1.7b", 2_031_739_904 - 151_936 * 2048)]
    #[case("qwen3-4b", 4_022_468_096)]
    #[case("qwen3-8b", 8_190_735_360)]
    #[case("qwen3-14b", 14_768_307_200)]
    #[case("qwen3-32b", 32_762_123_264)]
    fn shapes_have_the_published_number_of_parameters(#[case] name: &str, #[case] parameters: usize) {
        assert_eq!(model(name).unwrap().parameters(), parameters);
    }

    #[rstest]
    #[case("Llama3-8B", "llama-3-8b")]
    #[case("meta-llama/Llama-3.1-70B-Instruct", "llama-3-70b")]
    #[case("Llama-3.2-1B", "llama-3.2-1b")]
    #[case("Qwen/Qwen3-32B", "qwen3-32b")]
    #[case("qwen3-0.6b-base", "qwen3-0.6b")]
    fn spelling_is_free(#[case] spelled: &str, #[case] name: &str) {
        assert_eq!(model(spelled).unwrap().name, name);
    }

    #[test]
    fn all_names_are_models() {
        assert!(MODELS.iter().all(|name| model(name).unwrap().name == *name));
    }
}
