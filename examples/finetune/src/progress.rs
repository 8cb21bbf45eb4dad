//! How far a run is: a bar with the time left on a terminal, lines elsewhere.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Where a run says what it does; a clone is a handle. The default says nothing.
///
/// Saying something never fails: hours of training are worth more than their log. From the first line on that cannot be written it
/// is silent.
#[derive(Clone)]
pub struct Voice {
    say: Arc<Mutex<Say>>,
    bar: Arc<Mutex<Option<ProgressBar>>>,
    terminal: bool,
}

impl Voice {
    /// Lines to `say`, nothing else.
    pub fn new(say: impl Write + Send + 'static) -> Self {
        let say = Say { to: Box::new(say), failure: None };
        Self { say: Arc::new(Mutex::new(say)), bar: Arc::default(), terminal: false }
    }

    /// With a bar on standard error, where that is a terminal.
    pub fn with_bar(self) -> Self {
        Self { terminal: true, ..self }
    }

    /// A line, above the bar.
    pub(crate) fn line(&self, line: &str) {
        let write = || self.say().line(line);
        match &*self.bar() {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Why it is silent, once; `None` if it is not, or if whoever listened has gone.
    pub(crate) fn failure(&self) -> Option<io::Error> {
        self.say().failure.take().filter(|error| error.kind() != io::ErrorKind::BrokenPipe)
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

    fn say(&self) -> MutexGuard<'_, Say> {
        self.say.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bar(&self) -> MutexGuard<'_, Option<ProgressBar>> {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Say {
    to: Box<dyn Write + Send>,
    failure: Option<io::Error>,
}

impl Say {
    fn line(&mut self, line: &str) {
        if let Err(error) = writeln!(self.to, "{line}").and_then(|()| self.to.flush()) {
            *self = Self { to: Box::new(io::sink()), failure: Some(error) };
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk, or a pipe, that takes one line.
    struct One(Vec<u8>, io::ErrorKind);

    impl Write for One {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0.contains(&b'\n') {
                return Err(self.1.into());
            }
            self.0.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_voice_that_is_not_heard_is_silent_and_only_a_full_disk_is_a_failure() {
        for (kind, failure) in
            [(io::ErrorKind::BrokenPipe, None), (io::ErrorKind::StorageFull, Some(io::ErrorKind::StorageFull))]
        {
            let voice = Voice::new(One(Vec::new(), kind));
            voice.line("one");
            assert!(voice.failure().is_none());
            for line in ["two", "three"] {
                voice.line(line);
            }
            assert_eq!(voice.failure().map(|error| error.kind()), failure);
        }
    }
}
