//! Axes of parallelism: how the ranks of a world are divided between several techniques.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

use super::ProcessGroup;

/// An axis of a [`Mesh`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Different batches.
    Data,
    /// One sequence, keys and values passed around.
    Ring,
    /// One sequence, heads exchanged for tokens.
    Ulysses,
}

impl Axis {
    /// All of them, the slowest first.
    pub const ALL: [Self; 3] = [Self::Data, Self::Ring, Self::Ulysses];
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Data => "data",
            Self::Ring => "ring",
            Self::Ulysses => "ulysses",
        })
    }
}

/// How many ranks each axis has: `MeshShape { ulysses: 4, ..MeshShape::default() }`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MeshShape {
    /// Replicas with different batches.
    pub data: usize,
    /// Ranks of a ring.
    pub ring: usize,
    /// Ranks that exchange heads.
    pub ulysses: usize,
}

impl Default for MeshShape {
    fn default() -> Self {
        Self { data: 1, ring: 1, ulysses: 1 }
    }
}

impl MeshShape {
    /// One axis' degree.
    pub fn degree(&self, axis: Axis) -> usize {
        match axis {
            Axis::Data => self.data,
            Axis::Ring => self.ring,
            Axis::Ulysses => self.ulysses,
        }
    }

    /// The number of ranks that it takes, if it can be counted.
    pub fn ranks(&self) -> Option<usize> {
        self.data.checked_mul(self.ring)?.checked_mul(self.ulysses)
    }

    /// As it is typed: `data=2,ulysses=4`, a ring only where there is one.
    pub fn typed(&self) -> String {
        let ring = if self.ring == 1 { String::new() } else { format!("ring={},", self.ring) };
        format!("data={},{ring}ulysses={}", self.data, self.ulysses)
    }

    /// Fits the shape to a number of ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with the whole equation, if the degrees do not multiply to `ranks`.
    ///
    /// ```
    /// use burn_context_parallel::group::MeshShape;
    ///
    /// let shape = MeshShape { data: 2, ulysses: 3, ..MeshShape::default() };
    /// assert!(shape.check(6).is_ok());
    /// assert_eq!(
    ///     shape.check(4).unwrap_err().to_string(),
    ///     "mesh: data=2 x ulysses=3 needs 6 ranks, 4 were launched: launch 6, or use ulysses=2",
    /// );
    /// ```
    pub fn check(&self, ranks: usize) -> Result<()> {
        if ranks > 0 && self.ranks() == Some(ranks) {
            return Ok(());
        }
        let refuse = |problem, remedy: String| Err(Error::invalid("mesh", problem, remedy));
        if let Some(axis) = Axis::ALL.into_iter().find(|&axis| self.degree(axis) == 0) {
            return refuse(
                format!("{axis}=0 leaves no rank"),
                format!("an axis that is not used has degree 1: {axis}=1"),
            );
        }
        let Some(needed) = self.ranks() else {
            return refuse(format!("{self} is more ranks than can be counted"), "use smaller degrees".into());
        };
        // One degree changed is the smallest remedy; prefer an axis that is in use.
        let in_use = Axis::ALL.into_iter().rev().filter(|&axis| self.degree(axis) > 1);
        let unused = Axis::ALL.into_iter().rev().filter(|&axis| self.degree(axis) == 1);
        let fits = in_use.chain(unused).find_map(|axis| {
            let others = needed / self.degree(axis);
            (ranks > 0 && ranks.is_multiple_of(others)).then(|| format!("{axis}={}", ranks / others))
        });
        let remedy = match fits {
            Some(degree) => format!("launch {needed}, or use {degree}"),
            None => format!("launch {needed}, or change several degrees so that they multiply to {ranks}"),
        };
        let plural = if needed == 1 { "rank" } else { "ranks" };
        refuse(format!("{self} needs {needed} {plural}, {ranks} were launched"), remedy)
    }
}

/// What is wrong with a mesh that was typed. What to type in its place depends on where it was: that is for the caller to add.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseMeshError {
    /// A part without `=`.
    #[error("{0:?} is no axis with a degree")]
    Degree(String),
    /// A name that is no axis.
    #[error("no axis is called {0:?}")]
    Name(String),
    /// An axis that has a degree already.
    #[error("{0} is there twice")]
    Twice(Axis),
    /// A degree that is no whole number from 1.
    #[error("{0} has no degree from 1")]
    Number(String),
}

impl FromStr for MeshShape {
    type Err = ParseMeshError;

    /// Reads `data=2,ulysses=4`, in any order; an axis that is not named has degree 1. [`MeshShape::typed`] is the way back.
    ///
    /// # Errors
    ///
    /// [`ParseMeshError`].
    ///
    /// ```
    /// use burn_context_parallel::group::MeshShape;
    ///
    /// let shape = MeshShape { data: 2, ulysses: 4, ..MeshShape::default() };
    /// assert_eq!("data=2,ulysses=4".parse(), Ok(shape));
    /// assert_eq!("ulysses=4, data=2".parse(), Ok(shape));
    /// assert_eq!("tensor=2".parse::<MeshShape>().unwrap_err().to_string(), "no axis is called \"tensor\"");
    /// ```
    fn from_str(text: &str) -> std::result::Result<Self, ParseMeshError> {
        let mut shape = Self::default();
        let mut named = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (name, degree) = part.split_once('=').ok_or_else(|| ParseMeshError::Degree(part.to_owned()))?;
            let axis = Axis::ALL.into_iter().find(|axis| axis.to_string() == name.trim());
            let axis = axis.ok_or_else(|| ParseMeshError::Name(name.trim().to_owned()))?;
            if named.contains(&axis) {
                return Err(ParseMeshError::Twice(axis));
            }
            named.push(axis);
            let degree = degree.trim().parse().ok().filter(|degree| *degree > 0);
            let degree = degree.ok_or_else(|| ParseMeshError::Number(part.to_owned()))?;
            match axis {
                Axis::Data => shape.data = degree,
                Axis::Ring => shape.ring = degree,
                Axis::Ulysses => shape.ulysses = degree,
            }
        }
        Ok(shape)
    }
}

impl fmt::Display for MeshShape {
    /// The axes in use, as an equation's side.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used: Vec<_> = Axis::ALL
            .into_iter()
            .filter(|&axis| self.degree(axis) != 1)
            .map(|axis| format!("{axis}={}", self.degree(axis)))
            .collect();
        f.write_str(if used.is_empty() { "data=1".into() } else { used.join(" x ") }.as_str())
    }
}

/// Where a rank stands on each axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// Which replica.
    pub data: usize,
    /// Which place in the ring.
    pub ring: usize,
    /// Which place among those that exchange heads.
    pub ulysses: usize,
}

impl Coordinates {
    /// The place on one axis.
    pub fn on(&self, axis: Axis) -> usize {
        match axis {
            Axis::Data => self.data,
            Axis::Ring => self.ring,
            Axis::Ulysses => self.ulysses,
        }
    }
}

/// A world's ranks on three axes; ulysses is the fastest, since it talks the most, then ring, then data.
///
/// ```text
/// rank = (data_i * ring + ring_i) * ulysses + ulysses_i
/// ```
#[derive(Debug, Clone)]
pub struct Mesh {
    world: ProcessGroup,
    shape: MeshShape,
    coordinates: Coordinates,
    axes: [ProcessGroup; 3],
}

impl Mesh {
    /// Divides a world. Every rank of it makes the same mesh.
    ///
    /// # Errors
    ///
    /// As [`MeshShape::check`].
    ///
    /// # Communication
    ///
    /// None. An axis of degree 1 is a group of one rank, whose collectives cost nothing.
    ///
    /// ```
    /// use burn_context_parallel::group::{Axis, Mesh, MeshShape, launch};
    ///
    /// let rings = launch(4, |world| {
    ///     let mesh = Mesh::new(&world, MeshShape { ring: 2, ulysses: 2, ..MeshShape::default() })?;
    ///     Ok::<_, burn_context_parallel::Error>(mesh.axis(Axis::Ring).members().to_vec())
    /// })?;
    /// assert_eq!(rings, [[0, 2], [1, 3], [0, 2], [1, 3]]);
    /// # Ok::<(), burn_context_parallel::group::LaunchError>(())
    /// ```
    pub fn new(world: &ProcessGroup, shape: MeshShape) -> Result<Self> {
        shape.check(world.size())?;
        let coordinates = locate(shape, world.rank());
        let [data, ring, ulysses] = Axis::ALL.map(|axis| group(world, shape, &[axis]));
        Ok(Self { world: world.clone(), shape, coordinates, axes: [data?, ring?, ulysses?] })
    }

    /// A mesh of one rank.
    pub fn single() -> Self {
        let world = ProcessGroup::single();
        Self {
            shape: MeshShape::default(),
            coordinates: locate(MeshShape::default(), 0),
            axes: Axis::ALL.map(|_| world.clone()),
            world,
        }
    }

    /// The group that was divided.
    pub fn world(&self) -> &ProcessGroup {
        &self.world
    }

    /// The degrees.
    pub fn shape(&self) -> MeshShape {
        self.shape
    }

    /// Where this rank stands.
    pub fn coordinates(&self) -> Coordinates {
        self.coordinates
    }

    /// The ranks that differ from this one on that axis only.
    pub fn axis(&self, axis: Axis) -> &ProcessGroup {
        &self.axes[axis as usize]
    }

    /// The ranks that differ from this one on any of these axes; in the order of the world, whatever the order here.
    ///
    /// # Errors
    ///
    /// If the transport cannot make the group.
    pub fn over(&self, axes: &[Axis]) -> Result<ProcessGroup> {
        group(&self.world, self.shape, axes)
    }
}

fn locate(shape: MeshShape, rank: usize) -> Coordinates {
    Coordinates {
        data: rank / (shape.ring * shape.ulysses),
        ring: rank / shape.ulysses % shape.ring,
        ulysses: rank % shape.ulysses,
    }
}

fn group(world: &ProcessGroup, shape: MeshShape, axes: &[Axis]) -> Result<ProcessGroup> {
    let me = locate(shape, world.rank());
    let members: Vec<_> = (0..world.size())
        .filter(|&rank| {
            let other = locate(shape, rank);
            Axis::ALL.iter().all(|&axis| axes.contains(&axis) || other.on(axis) == me.on(axis))
        })
        .collect();
    world.subgroup(&members)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("data=2,ulysses=3", (2, 1, 3))]
    #[case("ring=2, ulysses=4", (1, 2, 4))]
    #[case(" ulysses = 4 ", (1, 1, 4))]
    fn a_mesh_is_degrees_of_axes_and_shows_as_it_is_typed(
        #[case] text: &str,
        #[case] (data, ring, ulysses): (usize, usize, usize),
    ) {
        let shape: MeshShape = text.parse().unwrap();
        assert_eq!(shape, MeshShape { data, ring, ulysses });
        assert_eq!(shape.typed().parse(), Ok(shape));
    }

    #[rstest]
    #[case("tensor=2", "no axis is called \"tensor\"")]
    #[case("data=2,data=2", "data is there twice")]
    #[case("data=0", "data=0 has no degree from 1")]
    #[case("data=-1", "data=-1 has no degree from 1")]
    #[case("ulysses=99999999999999999999", "ulysses=99999999999999999999 has no degree from 1")]
    #[case("8", "\"8\" is no axis with a degree")]
    #[case("", "\"\" is no axis with a degree")]
    #[case("data=2,", "\"\" is no axis with a degree")]
    fn what_is_no_mesh_is_named(#[case] text: &str, #[case] problem: &str) {
        assert_eq!(text.parse::<MeshShape>().unwrap_err().to_string(), problem);
    }
}
