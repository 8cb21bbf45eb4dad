//! How kernels on a CubeCL device cut attention into tiles: a value that can be printed, checked against a device, and forced.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// How the kernels of one attention are built. By default [chosen](Self::choose) for the device; forced with
/// [`FlashOptions::with_blueprint`](super::FlashOptions::with_blueprint). [`blueprint_for`](super::blueprint_for) tells which it is.
///
/// As text, the family, and own x step, vector and units: of all kernels, or of forward, dq, and dk and dv.
///
/// ```
/// use burn_context_parallel::flash::{Blueprint, DeviceLimits, Family};
///
/// let processor = DeviceLimits { plane: 1, units: 2, vector: 16, shared_bytes: 48 << 10, bindings: 64, wide_addresses: true };
/// let blueprint = Blueprint::choose(&processor, 64);
/// assert_eq!(blueprint.family, Family::Rows);
/// assert_eq!(blueprint.to_string(), "rows:64x4v16u2");
/// assert_eq!("rows:64x4v16u2".parse(), Ok(blueprint));
/// blueprint.check(&processor, 64)?;
/// let error = blueprint.check(&DeviceLimits { bindings: 8, ..processor }, 64).unwrap_err();
/// assert!(error.to_string().contains("10 buffers"));
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blueprint {
    /// Which kernels.
    pub family: Family,
    /// Of the forward pass: own rows are queries.
    pub forward: Tiles,
    /// Of dq: own rows are queries.
    pub queries: Tiles,
    /// Of dk and dv: own rows are keys.
    pub keys: Tiles,
}

/// A family of kernels; which is right follows from what a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// In registers and vectors, without shared memory: where units have nobody beside them, such as processors.
    Rows,
    /// In shared memory and two-dimensional blocks of registers, without operations across a plane: graphics cards.
    Block,
}

/// The tiles of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiles {
    /// Numbers of a vector: across rows in the family `rows`, along the head dimension in `block`.
    pub vector: usize,
    /// Rows that a unit (`rows`) or a cube (`block`) owns.
    pub own: usize,
    /// Rows of the other side that are met at once. The forward pass's sums depend on it, by rounding, and in the family `block` on the units;
    /// on nothing else here.
    pub step: usize,
    /// Units of a cube.
    pub units: usize,
}

/// What a device can do, as far as blueprints depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Units of a plane; 1 where units have nobody beside them.
    pub plane: usize,
    /// Units of a cube, at most.
    pub units: usize,
    /// f32 numbers of the widest vector.
    pub vector: usize,
    /// Bytes of shared memory of a cube.
    pub shared_bytes: usize,
    /// Buffers of a kernel, at most.
    pub bindings: usize,
    /// Whether tensors of 2^31 elements and more can be addressed.
    pub wide_addresses: bool,
}

/// The largest head dimension.
pub(crate) const MAX_DIM: usize = 256;
/// The most rows of a tile.
const MAX_ROWS: usize = 1024;
/// The most scores, or vectors of them, that a unit computes at once: each is code of its own, and compilers take minutes for more.
const MAX_SCORES: usize = 256;
const MAX_VECTORS: usize = 64;
/// Buffers of the kernel that has most of them: q, k, v, d_out, lse, delta, the table, dk, dv, and sizes.
const BUFFERS: usize = 10;
/// Tiles that are tried for a kernel.
#[cfg(feature = "autotune")]
pub(crate) const ALTERNATIVES: usize = 4;
/// Numbers of the head dimension that are in shared memory at once, of the family `block`.
pub(crate) const SLAB: usize = 16;

impl Blueprint {
    /// The blueprint for a device and a head dimension, by formula.
    pub fn choose(limits: &DeviceLimits, dim: usize) -> Self {
        if limits.plane == 1 { Self::rows(limits, dim) } else { Self::block(limits, dim) }
    }

    fn rows(limits: &DeviceLimits, dim: usize) -> Self {
        let vector = limits.vector.clamp(1, 16);
        let units = limits.units;
        // A number of the other side is read once for all vectors, and a register of own rows once for a step: 4 x 4 sums, which
        // leaves as many registers for the numbers themselves. Rows of 256 numbers leave the first-level cache.
        let vectors = if dim <= 128 { 4 } else { 2 };
        let tiles = Tiles { vector, own: vector * vectors, step: 4, units };
        Self { family: Family::Rows, forward: tiles, queries: tiles, keys: tiles }
    }

    fn block(limits: &DeviceLimits, dim: usize) -> Self {
        let vector = if dim.is_multiple_of(4) { 4 } else { 1 };
        // Narrow planes are those of a processor's vectors: each unit does more, so that less of what it does is reading.
        let units = match limits.plane {
            32.. if limits.units >= 256 => 256,
            0..=8 if dim <= 64 => 16,
            _ => 64,
        };
        let tiles = |own: usize| Tiles { vector, own, step: own, units };
        let fits = |rows: usize| shared_bytes(&tiles(rows)) <= limits.shared_bytes;
        let rows = [64, 32, 16].into_iter().find(|rows| fits(*rows) && rows * rows >= units).unwrap_or(16);
        // Sums of 64 rows of 256 numbers are more than a unit has registers for, as are those of 64 rows that are read number by number.
        let narrow = if dim > 128 || vector == 1 { rows.min(32) } else { rows };
        Self { family: Family::Block, forward: tiles(rows), queries: tiles(rows), keys: tiles(narrow) }
    }

    /// What is wrong with the blueprint for a device and a head dimension.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], with the numbers, if the device has too few units, bytes of shared memory or buffers, if tiles do not divide, or
    /// if they are too small for a row.
    pub fn check(&self, limits: &DeviceLimits, dim: usize) -> Result<()> {
        let refuse = |problem: String, remedy: &str| Err(Error::unsupported("Blueprint", problem, remedy));
        if dim == 0 || dim > MAX_DIM {
            return refuse(format!("a head dimension of {dim}"), "use one of 1 to 256, or a Flex device");
        }
        if limits.bindings < BUFFERS {
            let problem = format!("the kernels bind {BUFFERS} buffers, the device {} at most", limits.bindings);
            return refuse(problem, "use another device or graphics interface");
        }
        for (name, tiles) in [("forward", &self.forward), ("queries", &self.queries), ("keys", &self.keys)] {
            let Tiles { vector, own, step, units } = *tiles;
            if [vector, own, step, units].contains(&0) || !vector.is_power_of_two() || vector > 16 {
                return refuse(
                    format!("{name}: {tiles}"),
                    "use a vector of 1, 2, 4, 8 or 16 numbers, and at least one row and unit",
                );
            }
            if own.max(step) > MAX_ROWS {
                return refuse(format!("{name}: {tiles}"), "own 1024 rows at most, and step over 1024 at most");
            }
            if units > limits.units {
                let problem = format!("{name}: {units} units a cube, the device has {} at most", limits.units);
                return refuse(problem, "use fewer units");
            }
            match self.family {
                Family::Rows => {
                    if !own.is_multiple_of(vector) || own > 8 * vector || step > 32 {
                        return refuse(format!("{name}: {tiles}"), "own 1 to 8 vectors of rows, and step over 1 to 32");
                    }
                    let vectors = own / vector * step;
                    if vectors > MAX_VECTORS {
                        let problem = format!("{name}: {tiles}; {vectors} vectors of scores, {MAX_VECTORS} at most");
                        return refuse(problem, "own fewer rows, or step over fewer");
                    }
                }
                Family::Block => {
                    let side = block_side(units);
                    let whole = side * side == units && own.is_multiple_of(side) && step.is_multiple_of(side);
                    if !whole || !SLAB.is_multiple_of(vector) {
                        let remedy =
                            "use a square number of units, rows that its root divides, and a vector that divides 16";
                        return refuse(format!("{name}: {tiles}"), remedy);
                    }
                    let scores = own * step / units;
                    if scores > MAX_SCORES {
                        let problem = format!("{name}: {tiles}; {scores} scores a unit, {MAX_SCORES} at most");
                        return refuse(problem, "use more units, own fewer rows, or step over fewer");
                    }
                    // Tensors whose rows do not lie for that vector are read number by number.
                    for vector in [vector, 1] {
                        let (room, row) = (stage(vector, own + step), sum_row(vector, block_side(units), dim));
                        if room < row {
                            let problem = format!(
                                "{name}: {tiles}; a row of a sum is {row} vectors of {vector}, shared memory has {room}"
                            );
                            return refuse(problem, "own more rows, step over more, or use fewer units");
                        }
                    }
                    let bytes = shared_bytes(tiles);
                    if bytes > limits.shared_bytes {
                        let problem =
                            format!("{name}: {bytes} bytes of shared memory, the device has {}", limits.shared_bytes);
                        return refuse(problem, "own fewer rows, or step over fewer");
                    }
                }
            }
        }
        Ok(())
    }
}

/// Units along one side of a cube of the family `block`.
pub(crate) fn block_side(units: usize) -> usize {
    units.isqrt()
}

/// Vectors from row to row of a slab: one more than it has, so that rows begin in different banks.
pub(crate) fn slab_row(vector: usize) -> usize {
    SLAB / vector + 1
}

/// Vectors of the slabs of so many rows in shared memory.
pub(crate) fn stage(vector: usize, rows: usize) -> usize {
    rows * slab_row(vector)
}

/// Vectors of a row of D numbers that `side` units share evenly.
pub(crate) fn sum_row(vector: usize, side: usize, dim: usize) -> usize {
    dim.div_ceil(vector).next_multiple_of(side)
}

/// Bytes of shared memory of a cube of the family `block`: a slab of own rows and one of the other side's, twice, scores, and a statistic a
/// row and column of units.
pub(crate) fn shared_bytes(tiles: &Tiles) -> usize {
    let Tiles { vector, own, step, units } = *tiles;
    4 * ((own + step) * (SLAB + vector) + own * step + own * block_side(units))
}

#[cfg(feature = "autotune")]
impl Tiles {
    /// Tiles that give the same bits as these, which come first; fewer if a device cannot have them.
    pub(crate) fn alternatives(&self, family: Family) -> [Self; ALTERNATIVES] {
        match family {
            Family::Rows => {
                let vectors = self.own / self.vector;
                let others = [2, 3, 4, 6].into_iter().filter(|other| *other != vectors);
                let mut others = others.map(|vectors| Self { own: self.vector * vectors, ..*self });
                std::array::from_fn(|n| if n == 0 { *self } else { others.next().unwrap_or(*self) })
            }
            Family::Block => [
                *self,
                Self { own: self.own / 2, ..*self },
                Self { own: self.own * 2, ..*self },
                Self { own: self.own * 4, ..*self },
            ],
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rows => "rows",
            Self::Block => "block",
        })
    }
}

impl fmt::Display for Tiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector, own, step, units } = self;
        write!(f, "{own} rows by steps of {step}, vectors of {vector}, {units} units a cube")
    }
}

impl fmt::Display for Blueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { family, forward, queries, keys } = self;
        let text = |Tiles { vector, own, step, units }: &Tiles| format!("{own}x{step}v{vector}u{units}");
        write!(f, "{family}:{}", text(forward))?;
        if queries != forward || keys != forward {
            write!(f, ",{},{}", text(queries), text(keys))?;
        }
        Ok(())
    }
}

impl FromStr for Blueprint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::invalid(
                "Blueprint",
                format!("{text:?} is no blueprint"),
                "write rows or block, a colon, and own x step v vector u units of one kernel for all, or of forward, dq, and dk \
                 and dv: block:64x64v4u256, or block:64x64v4u256,64x64v4u256,32x32v4u256",
            )
        };
        let (family, tiles) = text.split_once(':').ok_or_else(wrong)?;
        let family = [Family::Rows, Family::Block].into_iter().find(|known| known.to_string() == family);
        let family = family.ok_or_else(wrong)?;
        let tiles: Option<Vec<Tiles>> = tiles.split(',').map(Tiles::read).collect();
        match tiles.ok_or_else(wrong)?[..] {
            [all] => Ok(Self { family, forward: all, queries: all, keys: all }),
            [forward, queries, keys] => Ok(Self { family, forward, queries, keys }),
            _ => Err(wrong()),
        }
    }
}

impl Tiles {
    fn read(text: &str) -> Option<Self> {
        let (own, rest) = text.split_once('x')?;
        let (step, rest) = rest.split_once('v')?;
        let (vector, units) = rest.split_once('u')?;
        // `parse` would take a sign, too.
        let number = |text: &str| text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
        Some(Self { vector: number(vector)?, own: number(own)?, step: number(step)?, units: number(units)? })
    }
}
