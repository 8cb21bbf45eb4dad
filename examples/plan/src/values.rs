//! What a word or a number on the command line may be.

use std::str::FromStr;

use burn_context_parallel::group::{Axis, MeshShape};
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
    scaled(text, &[("k", 1024.0), ("m", 1024.0 * 1024.0), ("g", 1024.0 * 1024.0 * 1024.0)])
        .ok_or_else(|| "give a number of tokens from 1: 100000, 512K (2^19) or 1.5M (1.5 x 2^20)".to_owned())
}

/// Bytes: 80G and 80GiB are 80 x 2^30, 1.9TB is 1.9 x 10^12.
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let mut units = Vec::new();
    for (index, letter) in ["k", "m", "g", "t"].iter().enumerate() {
        let power = index as i32 + 1;
        units.push((format!("{letter}ib"), 1024f64.powi(power)));
        units.push((format!("{letter}b"), 1000f64.powi(power)));
        units.push(((*letter).to_owned(), 1024f64.powi(power)));
    }
    let units: Vec<(&str, f64)> = units.iter().map(|(name, unit)| (name.as_str(), *unit)).collect();
    scaled(text, &units).ok_or_else(|| "give bytes: 80G or 80GiB (x 2^30), 1900GB or 1.9TB (x 10^9, 10^12)".to_owned())
}

/// A positive number with one of some units; the first that ends the text counts. Rounded down.
fn scaled(text: &str, units: &[(&str, f64)]) -> Option<usize> {
    let text = text.trim().to_ascii_lowercase().replace('_', "");
    if let Ok(whole) = text.parse::<usize>() {
        return Some(whole).filter(|whole| *whole > 0);
    }
    let (number, unit) = units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))?;
    let value = number.trim().parse::<f64>().ok()? * unit;
    // Beyond 2^53 a number has gaps.
    (value.is_finite() && (1.0..9e15).contains(&value)).then_some(value as usize)
}

/// `data=N,ulysses=M`.
pub(crate) fn mesh(text: &str) -> Result<MeshShape, String> {
    const FORM: &str = "give data=N,ulysses=M";
    let mut shape = MeshShape::default();
    let mut named = Vec::new();
    for part in text.split(',') {
        let (name, degree) =
            part.split_once('=').ok_or_else(|| format!("{part:?} is no axis with a degree: {FORM}"))?;
        let axis = Axis::ALL.into_iter().find(|axis| axis.to_string() == name.trim());
        let axis = axis.ok_or_else(|| format!("no axis is called {:?}: {FORM}", name.trim()))?;
        if named.contains(&axis) {
            return Err(format!("{axis} is there twice: {FORM}"));
        }
        named.push(axis);
        let degree = at_least_one(degree.trim()).map_err(|remedy| format!("{}: {remedy}", part.trim()))?;
        match axis {
            Axis::Data => shape.data = degree,
            Axis::Ring => shape.ring = degree,
            Axis::Ulysses => shape.ulysses = degree,
        }
    }
    Ok(shape)
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
    fn bytes_have_both_kinds_of_units(#[case] text: &str, #[case] expected: Option<usize>) {
        assert_eq!(bytes(text).ok(), expected);
    }

    #[rstest]
    #[case("data=2,ulysses=3", Ok((2, 1, 3)))]
    #[case("ring=2, ulysses=4", Ok((1, 2, 4)))]
    #[case("tensor=2", Err("no axis is called \"tensor\""))]
    #[case("data=2,data=2", Err("data is there twice"))]
    #[case("data=0", Err("data=0: give a whole number from 1"))]
    #[case("8", Err("\"8\" is no axis with a degree"))]
    fn a_mesh_is_degrees_of_axes(#[case] text: &str, #[case] expected: Result<(usize, usize, usize), &str>) {
        match (mesh(text), expected) {
            (Ok(shape), Ok(degrees)) => assert_eq!((shape.data, shape.ring, shape.ulysses), degrees),
            (Err(problem), Err(expected)) => assert!(problem.contains(expected), "{problem}"),
            (found, expected) => panic!("{found:?}, not {expected:?}"),
        }
    }
}
