//! What a word or a number on the command line may be.

use std::str::FromStr;

use burn_context_parallel::group::MeshShape;
use burn_upipe::plan::Compute;
use clap::ValueEnum;

/// What is asked.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// What one setup takes, and whether it fits.
    #[default]
    Plan,
    /// One technique after the other, and what each of them buys.
    Ladder,
    /// The fastest setup that fits a sequence; what is typed is held, all else is searched.
    Fit,
    /// The longest sequence that fits.
    Max,
}

/// How attention runs.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// The whole sequence on one rank.
    Single,
    /// Over ranks, all heads at once.
    Ulysses,
    /// Over ranks, some heads at a time.
    Upipe,
}

/// On or off.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// Where saved block inputs wait.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// On the device.
    None,
    /// In host memory.
    Host,
    /// On disk.
    Disk,
}

/// Where the optimizer's state is.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Beside the weights.
    Device,
    /// In host memory.
    Host,
}

/// The type that is computed in.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 16 bits with the range of f32.
    Bf16,
    /// 32 bits.
    F32,
}

impl From<Precision> for Compute {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::Bf16 => Self::Bf16,
            Precision::F32 => Self::F32,
        }
    }
}

/// How many blocks are one checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoint(pub Option<usize>);

impl FromStr for Checkpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "on" => Ok(Self(Some(1))),
            "off" => Ok(Self(None)),
            number => at_least_one(number)
                .map(|blocks| Self(Some(blocks)))
                .map_err(|_| "give on, off, or a number of blocks from 1".to_owned()),
        }
    }
}

/// The size of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// The usual size, for that which is tiled.
    On,
    /// No tiles.
    Off,
    /// So many tokens.
    Tokens(usize),
}

impl Tile {
    pub(crate) fn or(self, usual: usize) -> Option<usize> {
        match self {
            Self::On => Some(usual),
            Self::Off => None,
            Self::Tokens(tokens) => Some(tokens),
        }
    }
}

impl FromStr for Tile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "on" | "auto" => Ok(Self::On),
            "off" => Ok(Self::Off),
            number => {
                tokens(number).map(Self::Tokens).map_err(|_| "give a number of tokens from 1, on or off".to_owned())
            }
        }
    }
}

/// A number of tokens: 1000, 512K (2^19), 3.7M (3.7 x 2^20).
pub(crate) fn tokens(text: &str) -> Result<usize, String> {
    let mut units = Vec::new();
    for (index, letter) in ["k", "m", "g"].iter().enumerate() {
        let unit = 1024f64.powi(index as i32 + 1);
        units.extend([(format!("{letter}i"), unit), ((*letter).to_owned(), unit)]);
    }
    scaled(text, &units)
        .filter(|tokens| *tokens > 0)
        .ok_or_else(|| "give a number of tokens from 1: 100000, 512K (2^19) or 1.5M (1.5 x 2^20)".to_owned())
}

/// Bytes: 80G and 80GiB are 80 x 2^30, 1.9TB is 1.9 x 10^12.
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    bytes_or_none(text).and_then(|bytes| if bytes > 0 { Ok(bytes) } else { Err(NO_BYTES.to_owned()) })
}

const NO_BYTES: &str = "give bytes: 80G or 80GiB (x 2^30), 1900GB or 1.9TB (x 10^9, 10^12)";

/// The same, or 0.
pub(crate) fn bytes_or_none(text: &str) -> Result<usize, String> {
    let mut units = Vec::new();
    for (index, letter) in ["k", "m", "g", "t"].iter().enumerate() {
        let power = index as i32 + 1;
        units.push((format!("{letter}ib"), 1024f64.powi(power)));
        units.push((format!("{letter}b"), 1000f64.powi(power)));
        units.push(((*letter).to_owned(), 1024f64.powi(power)));
    }
    scaled(text, &units).ok_or_else(|| NO_BYTES.to_owned())
}

/// A number that is counted in, with a unit or without: beyond 2^53 numbers with a unit have gaps, and beyond 2^60 there is nothing to count.
fn scaled(text: &str, units: &[(String, f64)]) -> Option<usize> {
    let text = text.trim().to_ascii_lowercase().replace(['_', ','], "");
    if let Ok(whole) = text.parse::<usize>() {
        return Some(whole).filter(|whole| *whole < 1 << 60);
    }
    let with_unit = units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name.as_str())?, *unit)));
    let (number, unit) = with_unit.unwrap_or((&text, 1.0));
    // No infinities, no words.
    if !number.trim().starts_with(|first: char| first.is_ascii_digit() || first == '.') {
        return None;
    }
    let value = number.trim().parse::<f64>().ok()? * unit;
    // 1e6 is a whole number; 1.5 without a unit is none.
    let whole = unit > 1.0 || value.fract() == 0.0;
    let counted = value == 0.0 || (1.0..9e15).contains(&value);
    (counted && whole).then_some(value as usize)
}

/// `data=N,ulysses=M`.
pub(crate) fn mesh(text: &str) -> Result<MeshShape, String> {
    text.parse().map_err(|problem| format!("{problem}: give data=N,ulysses=M"))
}

pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number >= 1 => Ok(number),
        _ => Err("give a whole number from 1".to_owned()),
    }
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_normal() && number > 0.0 => Ok(number),
        _ => Err("give a number above 0".to_owned()),
    }
}

pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    match positive(text) {
        Ok(number) if number <= 1.0 => Ok(number),
        _ => Err("give a number above 0 and at most 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("1M", Some(1 << 20))]
    #[case("512K", Some(1 << 19))]
    #[case("512k", Some(1 << 19))]
    #[case("3.5m", Some(7 << 19))]
    #[case("131072", Some(131_072))]
    #[case("1_000", Some(1000))]
    #[case("1_000_000", Some(1_000_000))]
    #[case("1,000,000", Some(1_000_000))]
    #[case("1e6", Some(1_000_000))]
    #[case("2.4M", Some(2_516_582))]
    #[case("128Ki", Some(1 << 17))]
    #[case("4Mi", Some(1 << 22))]
    #[case("1 M", Some(1 << 20))]
    #[case("infm", None)]
    #[case("0M", None)]
    #[case("1152921504606846976", None)]
    #[case("0", None)]
    #[case("-1", None)]
    #[case("1.5", None)]
    #[case("nan", None)]
    #[case("nanM", None)]
    #[case("1e99M", None)]
    #[case("M", None)]
    #[case("99999999999999999999", None)]
    fn tokens_are_counted_in_powers_of_two(#[case] text: &str, #[case] expected: Option<usize>) {
        assert_eq!(tokens(text).ok(), expected);
    }

    #[rstest]
    #[case("80G", Some(80 << 30))]
    #[case("80GiB", Some(80 << 30))]
    #[case("1.9TB", Some(1_900_000_000_000))]
    #[case("100", Some(100))]
    #[case("80 gb", Some(80_000_000_000))]
    #[case("lots", None)]
    #[case("0G", None)]
    #[case("18446744073709551615", None)]
    #[case("1e9", Some(1_000_000_000))]
    fn bytes_have_both_kinds_of_units(#[case] text: &str, #[case] expected: Option<usize>) {
        assert_eq!(bytes(text).ok(), expected);
    }

    #[test]
    fn some_bytes_may_be_none() {
        assert_eq!((bytes_or_none("0"), bytes_or_none("0G")), (Ok(0), Ok(0)));
        assert!(bytes_or_none("-1").is_err() && bytes_or_none("").is_err());
    }

    #[test]
    fn a_mesh_that_is_none_comes_with_its_form() {
        assert_eq!(mesh("tensor=2").unwrap_err(), "no axis is called \"tensor\": give data=N,ulysses=M");
    }
}
