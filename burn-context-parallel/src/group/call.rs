//! What a rank announces when it enters a collective, and whether two announcements fit together.

use std::fmt;

use burn::tensor::DType;

use super::error::{Aspect, Claim};
use super::parcel::Parcel;

/// The collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Operation {
    /// Part `i` goes to rank `i`; equal shapes.
    AllToAll,
    /// Part `i` goes to rank `i`; announced shapes.
    AllToAllUneven,
    /// Every rank gets every part; equal shapes.
    AllGather,
    /// Every rank gets every part; any shapes.
    AllGatherUneven,
    /// Rank `i` gets the reduction of all parts `i`.
    ReduceScatter,
    /// Every rank gets the reduction of all values.
    AllReduce,
    /// Every rank gets the root's value.
    Broadcast,
    /// Every rank passes its value on around the ring.
    Shift,
    /// Every rank waits for all.
    Barrier,
}

impl Operation {
    /// All of them, in the order of their reports.
    pub const ALL: [Self; 9] = [
        Self::AllToAll,
        Self::AllToAllUneven,
        Self::AllGather,
        Self::AllGatherUneven,
        Self::ReduceScatter,
        Self::AllReduce,
        Self::Broadcast,
        Self::Shift,
        Self::Barrier,
    ];

    /// The name of its method.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllToAll => "all_to_all",
            Self::AllToAllUneven => "all_to_all_uneven",
            Self::AllGather => "all_gather",
            Self::AllGatherUneven => "all_gather_uneven",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::Shift => "shift",
            Self::Barrier => "barrier",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How values of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum, in rank order; half precision is summed in `f32`, integers wrap.
    Sum,
    /// The largest; NaN if any is NaN.
    Max,
}

/// What a [`Payload`](super::Payload) is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `TensorData`.
    Data,
    /// A float tensor.
    Float,
    /// An int tensor.
    Int,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data => "plain data",
            Self::Float => "a float tensor",
            Self::Int => "an int tensor",
        })
    }
}

/// The argument of a collective, which must be the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument {
    /// Which rank of the group a broadcast comes from.
    Root(usize),
    /// The reduction.
    Reduce(ReduceOp),
    /// How far a shift goes.
    By(isize),
    /// What ranks must agree on beyond the call: the digest of a mask, say.
    About(u64),
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root(root) => write!(f, "root {root}"),
            Self::Reduce(op) => write!(f, "{op:?}"),
            Self::By(by) => write!(f, "by {by}"),
            Self::About(digest) => write!(f, "options {digest:016x}"),
        }
    }
}

/// What a rank announces when it enters a collective.
///
/// A field that is `None` is one that this rank does not know (a broadcast's receiver does not know the shape), and agrees
/// with everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Which collective.
    pub operation: Operation,
    /// How many collectives this group had begun before.
    pub sequence: u64,
    /// Which exchange of a collective that needs several.
    pub step: u8,
    /// What is sent.
    pub kind: Option<Kind>,
    /// Its element type.
    pub dtype: Option<DType>,
    /// Root, reduction or step.
    pub argument: Option<Argument>,
    /// Its number of dimensions, where shapes may differ.
    pub dims: Option<usize>,
    /// The shapes that must be the same on all ranks: one, or one for each receiver.
    pub shapes: Option<Vec<Vec<usize>>>,
    /// What each member is expected to send to this rank.
    pub expects: Option<Vec<Option<Vec<usize>>>>,
}

impl Call {
    /// A call of which nothing but the operation is known.
    pub fn new(operation: Operation) -> Self {
        Self {
            operation,
            sequence: 0,
            step: 0,
            kind: None,
            dtype: None,
            argument: None,
            dims: None,
            shapes: None,
            expects: None,
        }
    }

    /// The same collective's next exchange.
    pub fn next_step(&self) -> Self {
        Self { step: self.step + 1, ..self.clone() }
    }

    /// The first thing in which two calls do not fit together, with what each says.
    pub fn difference(&self, other: &Self) -> Option<(Aspect, String, String)> {
        fn differ<T: PartialEq>(
            aspect: Aspect,
            (ours, theirs): (&Option<T>, &Option<T>),
            say: impl Fn(&T) -> String,
        ) -> Option<(Aspect, String, String)> {
            match (ours, theirs) {
                (Some(ours), Some(theirs)) if ours != theirs => Some((aspect, say(ours), say(theirs))),
                _ => None,
            }
        }
        if self.operation != other.operation {
            let (ours, theirs) = (self.operation.to_string(), other.operation.to_string());
            return Some((Aspect::Operation, ours, theirs));
        }
        differ(Aspect::Kind, (&self.kind, &other.kind), Kind::to_string)
            .or_else(|| differ(Aspect::DType, (&self.dtype, &other.dtype), |d| d.name().into()))
            .or_else(|| differ(Aspect::Argument, (&self.argument, &other.argument), Argument::to_string))
            .or_else(|| differ(Aspect::Dims, (&self.dims, &other.dims), usize::to_string))
            .or_else(|| {
                differ(Aspect::Shape, (&self.shapes, &other.shapes), |shapes| match &shapes[..] {
                    [shape] => format!("{shape:?}"),
                    shapes => format!("{shapes:?}"),
                })
            })
    }
}

/// One member's call and what it sends.
#[derive(Debug)]
pub struct Announcement<'a> {
    /// Its rank in the group.
    pub index: usize,
    /// Its rank in the world.
    pub rank: usize,
    /// What it announced.
    pub call: &'a Call,
    /// What it sends to each member.
    pub parcels: &'a [Option<Parcel>],
}

/// What is wrong between two members of a group, if anything: the calls, or a part that is sent and expected differently.
///
/// For transports: a transport whose ranks can see each other's announcements decides by this.
pub fn disagreement(one: &Announcement<'_>, other: &Announcement<'_>) -> Option<(Aspect, Claim, Claim)> {
    if let Some((aspect, ours, theirs)) = one.call.difference(other.call) {
        let ours = Claim { rank: one.rank, says: ours };
        return Some((aspect, ours, Claim { rank: other.rank, says: theirs }));
    }
    unexpected(one, other).or_else(|| unexpected(other, one))
}

fn unexpected(sender: &Announcement<'_>, receiver: &Announcement<'_>) -> Option<(Aspect, Claim, Claim)> {
    let expected = receiver.call.expects.as_ref()?.get(sender.index)?.as_deref();
    let sent = sender.parcels.get(receiver.index)?.as_ref().map(Parcel::shape);
    let say = |shape: Option<&[usize]>| match shape {
        Some(shape) => format!("{shape:?}"),
        None => "nothing".into(),
    };
    (expected != sent).then(|| {
        let to = format!("it sends {} to rank {}", say(sent), receiver.rank);
        let from = format!("it expects {} from rank {}", say(expected), sender.rank);
        (Aspect::Part, Claim { rank: receiver.rank, says: from }, Claim { rank: sender.rank, says: to })
    })
}
