//! The types of the arguments: what a word or a number on the command line (or in a configuration file) may be.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use burn::tensor::DType;
use burn_context_parallel::group::MeshShape;
use clap::ValueEnum;

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

/// What becomes of a run that is in the output folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnRun {
    /// It stays, and nothing starts.
    Refuse,
    /// It goes on.
    Resume,
    /// It is replaced.
    Overwrite,
}

/// How text becomes token ids.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokensFrom {
    /// The model folder's tokenizer.json; bytes for a model from scratch.
    Auto,
    /// Each byte is a token: ids 0 to 255.
    Bytes,
}

/// How documents share a sequence.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Documents where something ends them, otherwise a stream.
    Auto,
    /// Attention and targets stay within a document, positions restart in each.
    Documents,
    /// One text: attention, targets and positions run across the documents of a sequence.
    Stream,
}

/// In which order sequences come.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataOrder {
    /// That of the files.
    File,
    /// Another one in each epoch, drawn from the seed.
    Shuffle,
}

/// How the learning rate goes on after the warm-up.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// It stays.
    Constant,
    /// Half a cosine, down to the smallest.
    Cosine,
}

/// The type of the computation; weights and optimizer are f32 in any case.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 32 bits.
    F32,
    /// 16 bits with the range of f32.
    Bf16,
}

impl Precision {
    /// As tensors have it.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// The word that is typed for a value.
pub(crate) fn word<T: ValueEnum>(value: T) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// The size of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// From the shard's length.
    Auto,
    /// No tiles.
    Off,
    /// So many tokens.
    Tokens(usize),
}

impl FromStr for Tile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            number => match at_least::<1>(number) {
                Ok(tokens) => Ok(Self::Tokens(tokens)),
                Err(_) => Err("give a number of tokens from 1, auto or off".to_owned()),
            },
        }
    }
}

/// An amount of memory: `1073741824`, `1GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub usize);

/// From large to small.
const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unit = UNITS.into_iter().find_map(|(unit, power)| Some((text.strip_suffix(unit)?, power)));
        let (number, power) = unit.unwrap_or((text, 0));
        let bytes = number.trim_end().parse::<usize>().ok().and_then(|number| number.checked_mul(1 << power));
        bytes.map(Self).ok_or_else(|| "give a number of bytes, or one with KiB, MiB, GiB or TiB".to_owned())
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = |(_, power): &(&str, u32)| self.0 > 0 && self.0.is_multiple_of(1 << power);
        match UNITS.iter().find(|unit| whole(unit)) {
            Some((unit, power)) => write!(f, "{} {unit}", self.0 >> power),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// The largest norm, if any.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip(pub Option<f64>);

impl FromStr for Clip {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self(None)),
            number => match positive(number) {
                Ok(norm) => Ok(Self(Some(norm))),
                Err(problem) => Err(format!("{problem}, or none")),
            },
        }
    }
}

impl fmt::Display for Clip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(norm) => write!(f, "{norm}"),
            None => write!(f, "none"),
        }
    }
}

/// Some steps, counted from 1: `2-3`, or `1,4-6`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steps(Vec<RangeInclusive<usize>>);

impl Steps {
    /// From one to another, both included.
    pub(crate) fn range(first: usize, last: usize) -> Self {
        Self(vec![first..=last])
    }

    /// Whether `step` is among them.
    pub fn contains(&self, step: usize) -> bool {
        self.0.iter().any(|range| range.contains(&step))
    }

    /// The largest of them.
    pub fn last(&self) -> usize {
        self.0.iter().map(|range| *range.end()).max().unwrap_or(0)
    }
}

impl FromStr for Steps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (at_least::<1>(first.trim()).ok()?, at_least::<1>(last.trim()).ok()?);
            (first <= last).then_some(first..=last)
        };
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        ranges.map(Self).ok_or_else(|| "give steps from 1, as 2-3 or 1,4-6".to_owned())
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, range) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            match (range.start(), range.end()) {
                (first, last) if first == last => write!(f, "{comma}{first}")?,
                (first, last) => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

/// Degrees of a mesh: `data=2,ulysses=2`, an axis that is not named 1.
pub(crate) fn mesh(text: &str) -> Result<MeshShape, String> {
    const FORM: &str = "give data=N,ulysses=M, or one of the two";
    let shape: MeshShape = text.parse().map_err(|problem| format!("{problem}: {FORM}"))?;
    if shape.ring > 1 {
        return Err(format!("ring attention is not built: {FORM}"));
    }
    Ok(shape)
}

pub(crate) fn at_least<const MIN: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number >= MIN => Ok(number),
        _ => Err(format!("give a whole number from {MIN}")),
    }
}

pub(crate) fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("give a whole number from 0 to {}", u64::MAX))
}

/// What is done with the number is done in f32: in one that f32 does not hold it would be 0 or infinite.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (number as f32).is_normal() && number > 0.0 => Ok(number),
        Ok(number) if number.is_finite() && number > 0.0 => Err(in_f32("")),
        _ => Err("give a number above 0".to_owned()),
    }
}

pub(crate) fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number == 0.0 || (number as f32).is_normal() && number > 0.0 => Ok(number.abs()),
        Ok(number) if number.is_finite() && number > 0.0 => Err(in_f32("0 or ")),
        _ => Err("give 0 or a number above it".to_owned()),
    }
}

fn in_f32(or: &str) -> String {
    format!("give {or}a number from {:e} to {:e}, as 32 bits hold it", f32::MIN_POSITIVE, f32::MAX)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("0", false, true)]
    #[case("-0", false, true)]
    #[case("3e38", true, true)]
    #[case("4e38", false, false)]
    #[case("2e-38", true, true)]
    #[case("1e-38", false, false)]
    #[case("-2", false, false)]
    fn a_number_is_one_in_32_bits_too(#[case] text: &str, #[case] above: bool, #[case] from: bool) {
        assert_eq!((positive(text).is_ok(), not_negative(text).is_ok()), (above, from));
    }

    #[rstest]
    #[case("data=2,ulysses=3", Ok((2, 3)))]
    #[case("ulysses=3, data=2", Ok((2, 3)))]
    #[case("data=4", Ok((4, 1)))]
    #[case("ulysses=4", Ok((1, 4)))]
    #[case("ring=2", Err("ring attention is not built: give data=N"))]
    #[case("data=2,ring=1", Ok((2, 1)))]
    #[case("data=0", Err("data=0 has no degree from 1: give data=N,ulysses=M, or one of the two"))]
    #[case("tensor=2", Err("no axis is called \"tensor\": give data=N,ulysses=M, or one of the two"))]
    fn a_mesh_is_degrees_of_axes_without_a_ring(#[case] text: &str, #[case] expected: Result<(usize, usize), &str>) {
        match (mesh(text), expected) {
            (Ok(shape), Ok((data, ulysses))) => {
                assert_eq!(shape, MeshShape { data, ulysses, ..MeshShape::default() });
                assert_eq!(mesh(&shape.typed()), Ok(shape));
            }
            (Err(problem), Err(expected)) => assert!(problem.contains(expected), "{problem}"),
            (found, expected) => panic!("{found:?}, not {expected:?}"),
        }
    }

    #[rstest]
    #[case("auto", Some(Tile::Auto))]
    #[case("off", Some(Tile::Off))]
    #[case("7", Some(Tile::Tokens(7)))]
    #[case("0", None)]
    #[case("-3", None)]
    #[case("on", None)]
    fn a_tile_is_a_length_or_a_word(#[case] text: &str, #[case] expected: Option<Tile>) {
        assert_eq!(text.parse().ok(), expected);
    }

    #[rstest]
    #[case("0", Some(0), "0 bytes")]
    #[case("1500", Some(1500), "1500 bytes")]
    #[case("4096", Some(4096), "4 KiB")]
    #[case("3GiB", Some(3 << 30), "3 GiB")]
    #[case("3 MiB", Some(3 << 20), "3 MiB")]
    #[case("-1", None, "")]
    #[case("1.5GiB", None, "")]
    #[case("3GB", None, "")]
    #[case("99999999999TiB", None, "")]
    #[case("GiB", None, "")]
    fn bytes_have_units_of_1024(#[case] text: &str, #[case] expected: Option<usize>, #[case] shown: &str) {
        let bytes = text.parse::<Bytes>().ok();
        assert_eq!(bytes, expected.map(Bytes));
        assert!(bytes.is_none_or(|bytes| bytes.to_string() == shown), "{bytes:?}");
    }

    #[rstest]
    #[case("none", Some(Clip(None)))]
    #[case("0.5", Some(Clip(Some(0.5))))]
    #[case("0", None)]
    #[case("nan", None)]
    #[case("inf", None)]
    #[case("1e-300", None)]
    #[case("1e39", None)]
    fn a_clip_is_a_norm_or_none_and_shows_as_it_is_typed(#[case] text: &str, #[case] expected: Option<Clip>) {
        let clip = text.parse::<Clip>().ok();
        assert_eq!(clip, expected);
        assert!(clip.is_none_or(|clip| clip.to_string() == text));
    }
}
