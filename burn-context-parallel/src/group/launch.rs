//! Ranks as threads of this process.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::{Error, catch};

use super::ProcessGroup;
use super::error::{Cause, GroupError};
use super::threads::World;

/// The most ranks that [`launch`] starts.
pub const MAX_RANKS: usize = 4096;

/// The stacks that [`launch`] gives a rank, in bytes: less than 64 KiB overflows at once, more than 1 TiB no system has.
pub const STACKS: std::ops::RangeInclusive<usize> = 1 << 16..=1 << 40;

/// How to launch; a number of ranks is enough (`launch(4, ..)`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchConfig {
    /// How many.
    pub ranks: usize,
    /// How long a collective waits for its members. A rank that computes longer than this between two collectives must be
    /// given more.
    pub timeout: Duration,
    /// How long ranks may take to notice that the world has failed, before the launch returns without them.
    pub grace: Duration,
    /// Each rank's stack in bytes; autodiff recurses as deep as its graph.
    pub stack: usize,
}

impl LaunchConfig {
    /// Ranks with a timeout of 600 s, a grace of 5 s and stacks of 16 MiB.
    pub fn new(ranks: usize) -> Self {
        Self { ranks, timeout: Duration::from_secs(600), grace: Duration::from_secs(5), stack: 16 << 20 }
    }

    /// Another timeout.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Another grace.
    pub fn with_grace(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// Another stack size, in bytes.
    pub fn with_stack(self, stack: usize) -> Self {
        Self { stack, ..self }
    }
}

impl From<usize> for LaunchConfig {
    fn from(ranks: usize) -> Self {
        Self::new(ranks)
    }
}

type BoxError = Box<dyn StdError + Send + Sync>;

/// Why a launch, or one rank of it, did not succeed.
#[derive(Debug)]
#[non_exhaustive]
pub enum LaunchError {
    /// The configuration cannot be launched.
    Refused(Error),
    /// The operating system did not start a rank's thread.
    NotStarted {
        /// The rank.
        rank: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// A rank returned an error.
    Returned {
        /// The rank.
        rank: usize,
        /// That error, for downcasting.
        source: BoxError,
    },
    /// A rank panicked.
    Panicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A rank did not come back after the world had failed. Its thread was left behind.
    Abandoned {
        /// The rank.
        rank: usize,
        /// How long it was given.
        grace: Duration,
        /// The failure.
        source: Box<GroupError>,
    },
}

impl LaunchError {
    /// The rank that it is about.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Refused(_) => None,
            Self::NotStarted { rank, .. }
            | Self::Returned { rank, .. }
            | Self::Panicked { rank, .. }
            | Self::Abandoned { rank, .. } => Some(*rank),
        }
    }

    /// The failure of the group, if that is what this rank met.
    pub fn group_error(&self) -> Option<&GroupError> {
        let mut source = self.source();
        while let Some(error) = source {
            if let Some(Error::Group(error)) = error.downcast_ref() {
                return Some(error);
            }
            if let Some(error) = error.downcast_ref() {
                return Some(error);
            }
            source = error.source();
        }
        None
    }

    /// The rank's own error, if it is of that type.
    pub fn downcast_ref<E: StdError + 'static>(&self) -> Option<&E> {
        self.source()?.downcast_ref()
    }
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => error.fmt(f),
            Self::NotStarted { rank, source } => {
                write!(f, "rank {rank} could not be started: {source}: launch fewer ranks")
            }
            Self::Returned { rank, source } => write!(f, "rank {rank}: {source}"),
            Self::Panicked { rank, message } => write!(f, "rank {rank} panicked: {message}"),
            Self::Abandoned { rank, grace, source } => {
                write!(f, "rank {rank} was left behind {grace:?} after the failure: {source}")
            }
        }
    }
}

impl StdError for LaunchError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Refused(error) => Some(error),
            Self::NotStarted { source, .. } => Some(source),
            Self::Returned { source, .. } => Some(&**source),
            Self::Panicked { .. } => None,
            Self::Abandoned { source, .. } => Some(&**source),
        }
    }
}

/// Runs `f` once per rank, each on its own thread, and returns what they returned, by rank.
///
/// An error that is raised in `f` ([`raise`](crate::raise): from a module's forward or a backward step) counts as returned. A
/// rank that fails, panics or returns while others wait for it ends the world: everyone else gets a [`GroupError`] from
/// the collective it is in, or the next one.
///
/// A thread cannot be stopped from outside. A rank that is stuck in its own code after the world has failed is left
/// behind when the [grace](LaunchConfig::grace) is over; it ends at its next collective, or with the process.
///
/// # Errors
///
/// If any rank fails, the error of the rank where it began, and of the lowest rank that failed if that one has none (it
/// returned too early). [`LaunchError::Refused`] for no ranks, more than [`MAX_RANKS`], or a stack outside [`STACKS`].
///
/// # Memory
///
/// A stack per rank: address space, of which the system provides what is touched.
///
/// ```
/// use burn_context_parallel::group::launch;
///
/// let sizes = launch(3, |world| world.barrier().map(|()| world.size()))?;
/// assert_eq!(sizes, [3, 3, 3]);
///
/// let failed = launch(3, |world| match world.rank() {
///     1 => Err("no data".into()),
///     _ => world.barrier().map_err(Box::<dyn std::error::Error + Send + Sync>::from),
/// });
/// assert_eq!(failed.unwrap_err().to_string(), "rank 1: no data");
/// # Ok::<(), burn_context_parallel::group::LaunchError>(())
/// ```
pub fn launch<T, E, F>(config: impl Into<LaunchConfig>, f: F) -> Result<Vec<T>, LaunchError>
where
    T: Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>>,
    F: Fn(ProcessGroup) -> Result<T, E> + Send + Sync + 'static,
{
    let (outcomes, failure) = run(config.into(), f)?;
    if outcomes.iter().all(Result::is_ok) {
        return Ok(outcomes.into_iter().flatten().collect());
    }
    let origin = failure.map(|failure| failure.rank);
    let mut errors: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
    let first = errors.iter().position(|error| error.rank() == origin).unwrap_or(0);
    Err(errors.swap_remove(first))
}

/// As [`launch`], but returns every rank's own outcome.
///
/// # Errors
///
/// [`LaunchError::Refused`], as [`launch`]; what ranks do is in the outcomes.
pub fn launch_each<T, E, F>(config: impl Into<LaunchConfig>, f: F) -> Result<Vec<Result<T, LaunchError>>, LaunchError>
where
    T: Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>>,
    F: Fn(ProcessGroup) -> Result<T, E> + Send + Sync + 'static,
{
    Ok(run(config.into(), f)?.0)
}

type Outcomes<T> = Vec<Result<T, LaunchError>>;

enum Event<T> {
    Done(usize, Result<T, LaunchError>),
    Failed,
}

fn run<T, E, F>(config: LaunchConfig, f: F) -> Result<(Outcomes<T>, Option<GroupError>), LaunchError>
where
    T: Send + 'static,
    E: Into<BoxError>,
    F: Fn(ProcessGroup) -> Result<T, E> + Send + Sync + 'static,
{
    let ranks = config.ranks;
    if ranks == 0 || ranks > MAX_RANKS {
        return Err(LaunchError::Refused(Error::invalid(
            "launch",
            format!("{ranks} ranks were asked for"),
            format!("launch 1 to {MAX_RANKS}"),
        )));
    }
    if !STACKS.contains(&config.stack) {
        return Err(LaunchError::Refused(Error::invalid(
            "launch",
            format!("stacks of {} bytes", config.stack),
            format!("use {} to {}; the default is {}", STACKS.start(), STACKS.end(), LaunchConfig::new(1).stack),
        )));
    }
    let (events, inbox) = channel();
    let alarm = events.clone();
    let world = World::new(ranks, config.timeout, move || {
        // Nobody listens once the launch has returned.
        let _ = alarm.send(Event::Failed);
    });
    let f = Arc::new(f);
    let mut threads: Vec<Option<JoinHandle<()>>> = Vec::with_capacity(ranks);
    let mut outcomes: Vec<Option<Result<T, LaunchError>>> = (0..ranks).map(|_| None).collect();
    for rank in 0..ranks {
        let (f, world, events) = (f.clone(), world.clone(), events.clone());
        let body = {
            let world = world.clone();
            move || {
                let outcome = live(rank, &world, &*f);
                // The last handle of `f` may own things whose destructors the caller wants to have run.
                drop(f);
                let _ = events.send(Event::Done(rank, outcome));
            }
        };
        let builder = Builder::new().name(format!("rank {rank}")).stack_size(config.stack);
        match builder.spawn(body) {
            Ok(thread) => threads.push(Some(thread)),
            Err(source) => {
                world.fail(rank, Cause::Failed(format!("its thread could not be started: {source}")));
                outcomes[rank] = Some(Err(LaunchError::NotStarted { rank, source }));
                // The ranks after it are not started at all; they have nothing to say but the failure.
                for (rank, outcome) in outcomes.iter_mut().enumerate().skip(rank + 1) {
                    let source = world.failure().expect("just recorded");
                    *outcome = Some(Err(LaunchError::Returned { rank, source: Box::new(source) }));
                }
                break;
            }
        }
    }
    collect(&inbox, &world, config.grace, &mut outcomes, &mut threads);
    let failure = world.failure();
    let outcomes = outcomes.into_iter().enumerate().map(|(rank, outcome)| {
        outcome.unwrap_or_else(|| {
            let source = failure.clone().expect("only a failed world is left without an outcome");
            let source = Box::new(source);
            Err(LaunchError::Abandoned { rank, grace: config.grace, source })
        })
    });
    Ok((outcomes.collect(), failure))
}

/// One rank's life: whatever happens in `f`, the world learns of it.
fn live<T, E, F>(rank: usize, world: &Arc<World>, f: &F) -> Result<T, LaunchError>
where
    E: Into<BoxError>,
    F: Fn(ProcessGroup) -> Result<T, E>,
{
    let group = ProcessGroup::from_transport(Arc::new(world.endpoint(rank)));
    let outcome =
        catch_unwind(AssertUnwindSafe(|| catch(|| f(group).map_err(Into::into)).map_err(BoxError::from).flatten()));
    match outcome {
        Ok(Ok(value)) => {
            world.depart(rank);
            Ok(value)
        }
        Ok(Err(source)) => {
            world.fail(rank, Cause::Failed(source.to_string()));
            Err(LaunchError::Returned { rank, source })
        }
        Err(payload) => {
            let message = message(&*payload);
            world.fail(rank, Cause::Panicked(message.clone()));
            Err(LaunchError::Panicked { rank, message })
        }
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(message) = payload.downcast_ref::<&str>() {
        (*message).to_owned()
    } else if let Some(message) = payload.downcast_ref::<String>() {
        message.clone()
    } else {
        "a panic without a message".to_owned()
    }
}

/// Waits for every rank, but only for the grace once the world has failed.
fn collect<T>(
    inbox: &Receiver<Event<T>>,
    world: &World,
    grace: Duration,
    outcomes: &mut [Option<Result<T, LaunchError>>],
    threads: &mut [Option<JoinHandle<()>>],
) {
    let mut deadline = None;
    while outcomes.iter().any(Option::is_none) {
        let event = match deadline {
            None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(deadline) => inbox.recv_timeout(Instant::saturating_duration_since(&deadline, Instant::now())),
        };
        match event {
            Ok(Event::Done(rank, outcome)) => {
                outcomes[rank] = Some(outcome);
                if let Some(thread) = threads.get_mut(rank).and_then(Option::take) {
                    // It has nothing left to do but to drop its thread-locals.
                    let _ = thread.join();
                }
            }
            Ok(Event::Failed) => deadline = Instant::now().checked_add(grace),
            Err(_) => {
                debug_assert!(world.failure().is_some());
                return;
            }
        }
    }
}
