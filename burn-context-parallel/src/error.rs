//! What can go wrong, as one type: every error tells what, the numbers, and the remedy.

use std::cell::Cell;
use std::error::Error as StdError;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};
use std::sync::Arc;

use crate::group::GroupError;

/// Any failure of this crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed, here or on another rank.
    #[error(transparent)]
    Group(#[from] GroupError),

    /// An argument does not fit: the message holds the numbers and the remedy.
    #[error("{operation}: {problem}: {remedy}")]
    Invalid {
        /// The operation or constructor that refused.
        operation: &'static str,
        /// What does not fit, with its numbers.
        problem: String,
        /// What to change.
        remedy: String,
    },

    /// The request is meaningful, but not built (yet).
    #[error("{operation}: {what} is not supported: {remedy}")]
    Unsupported {
        /// The operation that refused.
        operation: &'static str,
        /// What was asked for.
        what: String,
        /// What works in its place.
        remedy: String,
    },

    /// A failure of a crate that builds on this one: [`Error::foreign`], [`Error::downcast_ref`].
    #[error(transparent)]
    Foreign(Foreign),
}

/// Another crate's error, on its way through [`raise`] and [`catch`].
///
/// Two are equal if they say the same.
#[derive(Debug, Clone)]
pub struct Foreign(Arc<dyn StdError + Send + Sync>);

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for Foreign {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

impl PartialEq for Foreign {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.to_string() == other.to_string()
    }
}

impl Error {
    /// An [`Error::Invalid`].
    pub fn invalid(operation: &'static str, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Invalid { operation, problem: problem.into(), remedy: remedy.into() }
    }

    /// An [`Error::Unsupported`].
    pub fn unsupported(operation: &'static str, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Unsupported { operation, what: what.into(), remedy: remedy.into() }
    }

    /// An [`Error::Foreign`].
    ///
    /// ```
    /// use burn_context_parallel::{Error, catch, raise};
    ///
    /// let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
    /// let error = catch(|| raise(Error::foreign(full))).unwrap_err();
    /// assert_eq!(error.downcast_ref::<std::io::Error>().unwrap().kind(), std::io::ErrorKind::StorageFull);
    /// ```
    pub fn foreign(error: impl StdError + Send + Sync + 'static) -> Self {
        Self::Foreign(Foreign(Arc::new(error)))
    }

    /// The other crate's error, if this is one and of that type.
    pub fn downcast_ref<E: StdError + 'static>(&self) -> Option<&E> {
        match self {
            Self::Foreign(foreign) => foreign.0.downcast_ref(),
            _ => None,
        }
    }
}

/// The result of everything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

thread_local! {
    static CATCHING: Cell<usize> = const { Cell::new(0) };
}

/// Leaves a place whose signature has no room for an error: a module's forward, or a backward step.
///
/// Under [`catch`] (every rank of a [`launch`](crate::group::launch) runs under it) the error arrives there as a value and
/// nothing is printed. Elsewhere it is an ordinary panic whose message is the error's.
///
/// # Panics
///
/// Always; that is its purpose.
pub fn raise(error: impl Into<Error>) -> ! {
    let error = error.into();
    if CATCHING.get() > 0 {
        // Skips the panic hook: the error is reported once, by whoever catches it.
        resume_unwind(Box::new(error));
    }
    // A string payload, so that the default hook and test harnesses can show it.
    panic_any(error.to_string());
}

/// Unwraps, or [`raise`]s.
pub trait OrRaise<T> {
    /// The value, or [`raise`] with the error.
    ///
    /// # Panics
    ///
    /// As [`raise`], if this is an error.
    fn or_raise(self) -> T;
}

impl<T, E: Into<Error>> OrRaise<T> for std::result::Result<T, E> {
    fn or_raise(self) -> T {
        match self {
            Ok(value) => value,
            Err(error) => raise(error),
        }
    }
}

/// Runs `f`; an [`Error`] raised in it, in forward or inside a backward step, comes back as a value.
///
/// # Errors
///
/// The error that was raised.
///
/// # Panics
///
/// Any other panic of `f` goes on unwinding.
///
/// ```
/// use burn_context_parallel::{Error, catch, raise};
///
/// let caught = catch(|| -> usize { raise(Error::unsupported("attention", "a dense mask", "use causal")) });
/// assert!(caught.unwrap_err().to_string().contains("dense mask"));
/// assert_eq!(catch(|| 7), Ok(7));
/// ```
pub fn catch<T>(f: impl FnOnce() -> T) -> Result<T> {
    struct Depth;
    impl Drop for Depth {
        fn drop(&mut self) {
            CATCHING.set(CATCHING.get() - 1);
        }
    }
    CATCHING.set(CATCHING.get() + 1);
    let depth = Depth;
    let result = catch_unwind(AssertUnwindSafe(f));
    drop(depth);
    result.map_err(|payload| match payload.downcast::<Error>() {
        Ok(error) => *error,
        Err(other) => resume_unwind(other),
    })
}
