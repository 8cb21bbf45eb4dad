//! How far a run is: a bar with the time left on a terminal, lines elsewhere.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::error::{Error, Result};

/// Where a run says what it does; a clone is a handle. The default says nothing.
#[derive(Clone)]
pub struct Voice {
    say: Arc<Mutex<dyn Write + Send>>,
    bar: Arc<Mutex<Option<ProgressBar>>>,
    terminal: bool,
}

impl Voice {
    /// Lines to `say`, nothing else.
    pub fn new(say: impl Write + Send + 'static) -> Self {
        Self { say: Arc::new(Mutex::new(say)), bar: Arc::default(), terminal: false }
    }

    /// With a bar on standard error, where that is a terminal.
    pub fn with_bar(self) -> Self {
        Self { terminal: true, ..self }
    }

    /// A line, above the bar.
    ///
    /// # Errors
    ///
    /// [`Error::Say`] if nobody listens any more.
    pub(crate) fn line(&self, line: &str) -> Result<()> {
        let write = || {
            let mut say = self.say.lock().unwrap_or_else(PoisonError::into_inner);
            writeln!(say, "{line}").and_then(|()| say.flush()).map_err(Error::Say)
        };
        match &*self.bar() {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Starts a bar of so many parts.
    pub(crate) fn begin(&self, parts: usize) {
        if !self.terminal {
            return;
        }
        let bar = ProgressBar::with_draw_target(Some(parts as u64), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len}  {elapsed} gone, {eta} left") {
            bar.set_style(style);
        }
        // The first part may take minutes.
        bar.tick();
        *self.bar() = Some(bar);
    }

    /// So many parts are done.
    pub(crate) fn done(&self, parts: usize) {
        if let Some(bar) = &*self.bar() {
            bar.set_position(parts as u64);
        }
    }

    /// Takes the bar away.
    pub(crate) fn end(&self) {
        if let Some(bar) = self.bar().take() {
            bar.finish_and_clear();
        }
    }

    fn bar(&self) -> std::sync::MutexGuard<'_, Option<ProgressBar>> {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the bar away at the end of a block, also after an error, whose message must stand alone.
pub(crate) struct Bar<'a>(pub &'a Voice);

impl Drop for Bar<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Default for Voice {
    fn default() -> Self {
        Self::new(io::sink())
    }
}
