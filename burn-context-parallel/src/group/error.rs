//! What a group says when it breaks: where it began, in which operation, and why.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::call::Operation;

/// The one failure that ended a world. Every rank of every group of that world gets the same value.
///
/// A failure has one origin: whatever goes wrong first is recorded, and what other ranks do because of it does not replace
/// it. So the error of any rank says where to look.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", Sentence(self))]
pub struct GroupError {
    /// The rank, in the world, where it began.
    pub rank: usize,
    /// What that rank was doing, or was missed in.
    pub operation: Site,
    /// What happened.
    pub cause: Cause,
}

/// One collective, as every member counts it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Which collective.
    pub operation: Operation,
    /// How many collectives this group had begun before.
    pub sequence: u64,
    /// The group's members, by their rank in the world.
    pub members: Arc<[usize]>,
}

/// Where a failure happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Site {
    /// In a collective.
    Collective(Place),
    /// In the rank's own code.
    Outside {
        /// The last collective which that rank had entered.
        after: Option<Place>,
    },
}

/// Why a group broke.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The rank returned this error.
    Failed(String),
    /// The rank panicked with this message.
    Panicked(String),
    /// The rank returned without an error while others wait for it.
    Departed,
    /// Ranks did not arrive in time.
    TimedOut {
        /// How long the first to give up had waited.
        after: Duration,
        /// The ranks, in the world, that were waited for and wait for nobody themselves.
        missing: Vec<usize>,
    },
    /// Ranks made calls that do not fit together.
    Disagreed {
        /// On what.
        on: Aspect,
        /// One side.
        ours: Claim,
        /// The other, of the rank that the error names.
        theirs: Claim,
    },
}

/// What ranks can disagree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Aspect {
    /// Which collective comes next.
    Operation,
    /// Plain data, float tensors or int tensors.
    Kind,
    /// The element type.
    DType,
    /// The root, the reduction, or the step of a shift.
    Argument,
    /// The number of dimensions.
    Dims,
    /// Shapes.
    Shape,
    /// What one rank sends to another, and what that one expects.
    Part,
}

/// What one rank holds true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Its rank in the world.
    pub rank: usize,
    /// What it says.
    pub says: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{} of ranks {:?}", self.operation, self.sequence, self.members)
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Collective(place) => write!(f, "in {place}"),
            Self::Outside { after: None } => f.write_str("outside a collective, before the first one"),
            Self::Outside { after: Some(place) } => {
                write!(f, "outside a collective, after {place}")
            }
        }
    }
}

impl fmt::Display for Aspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Operation => "the operation",
            Self::Kind => "the kind of value",
            Self::DType => "the element type",
            Self::Argument => "an argument",
            Self::Dims => "the number of dimensions",
            Self::Shape => "the shape",
            Self::Part => "a part",
        })
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} says {}", self.rank, self.says)
    }
}

/// A [`GroupError`] in words.
struct Sentence<'a>(&'a GroupError);

impl fmt::Display for Sentence<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GroupError { rank, operation, cause } = self.0;
        match cause {
            Cause::Failed(message) => write!(f, "rank {rank} failed {operation}: {message}"),
            Cause::Panicked(message) => write!(f, "rank {rank} panicked {operation}: {message}"),
            Cause::Departed => write!(
                f,
                "rank {rank} returned, but others wait for it {operation}: \
                 every member must make the same calls"
            ),
            Cause::TimedOut { after, missing } => write!(
                f,
                "ranks {missing:?} were waited for {operation}, for {after:?}: \
                 find what holds them, or raise the timeout if they are only slow"
            ),
            Cause::Disagreed { on, ours, theirs } => write!(
                f,
                "ranks disagree on {on} {operation}: {ours}, {theirs}: \
                 every member must make the same calls in the same order"
            ),
        }
    }
}
