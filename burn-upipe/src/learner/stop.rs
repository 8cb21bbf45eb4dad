//! Whether the run shall save, or save and end: asked for by a signal or by a file, and agreed by all ranks.
//!
//! Ranks see such things at different moments, and must not act on them at different steps. So each says what it
//! [wants](Decision) at the end of a step, and all do the most that any of them wants:
//!
//! ```
//! use burn_context_parallel::group::launch;
//! use burn_upipe::learner::stop::Decision;
//!
//! let decisions = launch(3, |world| {
//!     let wanted = if world.rank() == 1 { Decision::Save } else { Decision::Continue };
//!     wanted.agree(&world)
//! })?;
//! assert_eq!(decisions, [Decision::Save; 3]);
//! # Ok::<(), burn_context_parallel::group::LaunchError>(())
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use burn::tensor::TensorData;
use burn_context_parallel::Result;
use burn_context_parallel::group::{ProcessGroup, ReduceOp};

/// What to do after a step; the later, the more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Decision {
    /// The next step.
    Continue,
    /// Save, then the next step.
    Save,
    /// Save, and end.
    SaveAndStop,
}

impl Decision {
    /// What this rank wants, as a signal and a file have it.
    pub fn wanted(stop: &Stop, save_now: &SaveNow) -> Self {
        match (stop.requested(), save_now.requested()) {
            (true, _) => Self::SaveAndStop,
            (false, true) => Self::Save,
            (false, false) => Self::Continue,
        }
    }

    /// The most that any rank wants. Every rank calls it, and gets the same.
    ///
    /// # Errors
    ///
    /// [`burn_context_parallel::Error::Group`] if the group broke.
    ///
    /// # Communication
    ///
    /// Four bytes to every rank.
    pub fn agree(self, group: &ProcessGroup) -> Result<Self> {
        let most = group.all_reduce(TensorData::from([self as i32]), ReduceOp::Max)?;
        Ok(match most.iter::<i32>().next() {
            Some(0) => Self::Continue,
            Some(1) => Self::Save,
            _ => Self::SaveAndStop,
        })
    }
}

/// Whether the run shall end. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    requested: Arc<AtomicBool>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nobody looks at it any more: from now on a signal does what it does without us.
        self.requested.store(true, SeqCst);
    }
}

impl Stop {
    /// Ends only when it is [asked](Self::request) to.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends on SIGINT (Ctrl-C) and SIGTERM as well. The first one asks, the second does what it does in any program, so that a run that
    /// is stuck can be ended; so does the first one after this value and its clones are gone. Elsewhere than on Unix no signal is heard.
    ///
    /// Signals belong to the process: this is for a program's `main`.
    ///
    /// # Errors
    ///
    /// The system's, if it does not let signals be handled.
    pub fn on_signals() -> io::Result<Self> {
        let stop = Self::new();
        #[cfg(unix)]
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // In this order: the first signal finds the flag down, and raises it.
            signal_hook::flag::register_conditional_default(signal, stop.0.requested.clone())?;
            signal_hook::flag::register(signal, stop.0.requested.clone())?;
        }
        Ok(stop)
    }

    /// Asks.
    pub fn request(&self) {
        self.0.requested.store(true, SeqCst);
    }

    /// Whether somebody has asked.
    pub fn requested(&self) -> bool {
        self.0.requested.load(SeqCst)
    }
}

/// A file whose appearance asks for a checkpoint at the next step: `touch OUT/save-now`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveNow {
    path: PathBuf,
}

impl SaveNow {
    /// `save-now` in the run's folder.
    pub fn in_folder(out: &Path) -> Self {
        Self { path: out.join("save-now") }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is there. A folder of that name is somebody's, and asks for nothing.
    pub fn requested(&self) -> bool {
        self.path.is_file()
    }

    /// Removes it, after the checkpoint was saved. One rank does this; that it is gone already is no error.
    ///
    /// # Errors
    ///
    /// The system's. The file asks on then: do not go on without a word.
    pub fn served(&self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
