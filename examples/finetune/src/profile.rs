//! `--profile`: some steps of every rank, recorded and written; and a last word when memory is out.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Device;
use burn_upipe::profile::{self, DevicePools, Entered, Profiler, RankHeap, Report, Timeline, heap};

use crate::error::{Error, Result};
use crate::memory::PHASES;
use crate::plan::Profile;

/// What memory was full of.
const OUT_OF_MEMORY: &str = "out-of-memory.txt";

/// What a profile consists of.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    profile::FILES.into_iter().chain([OUT_OF_MEMORY]).map(|name| folder.join(name)).collect()
}

/// The profile of a run while it is made.
pub(crate) struct Profiling {
    plan: Profile,
    done: Mutex<Vec<Timeline>>,
    _armed: heap::Armed,
}

impl Profiling {
    /// Makes the folder, so that what is wrong with it shows now.
    pub(crate) fn begin(plan: &Profile) -> Result<Arc<Self>> {
        fs::create_dir_all(&plan.folder).map_err(|source| Error::Write { path: plan.folder.clone(), source })?;
        let path = plan.folder.join(OUT_OF_MEMORY);
        let armed = heap::on_out_of_memory(move |bytes| {
            let text = profile::out_of_memory(&format!("an allocation of {bytes} bytes failed"));
            let said = match fs::write(&path, text) {
                Ok(()) => format!("error: out of memory: see {}", path.display()),
                Err(error) => format!("error: out of memory; {}: {error}", path.display()),
            };
            // The process ends after this: nobody else will say it.
            let _ = writeln!(io::stderr(), "{said}");
        });
        Ok(Arc::new(Self { plan: plan.clone(), done: Mutex::default(), _armed: armed }))
    }

    /// A rank's part; called on its thread. Its memory is read where its device has it.
    pub(crate) fn rank(self: &Arc<Self>, rank: usize, device: &Device) -> RankProfile {
        let profiler = match DevicePools::new(&device.clone().inner()) {
            Some(pools) => Profiler::new(rank, pools),
            None => Profiler::new(rank, RankHeap::new(rank)),
        };
        let entered = profiler.enter();
        RankProfile { profiler, _entered: entered, whole: self.clone() }
    }

    /// Writes what there is, also of a run that failed. The most bytes of each of the planner's phases on the rank that held most.
    pub(crate) fn end(
        &self,
        failure: Option<&(dyn std::error::Error + 'static)>,
    ) -> Result<Vec<(&'static str, usize)>> {
        let folder = &self.plan.folder;
        if let Some(error) = failure.filter(|error| profile::is_out_of_memory(*error)) {
            let path = folder.join(OUT_OF_MEMORY);
            fs::write(&path, profile::out_of_memory(&error.to_string()))
                .map_err(|source| Error::Write { path, source })?;
        }
        let ranks = std::mem::take(&mut *self.done.lock().unwrap_or_else(PoisonError::into_inner));
        let report = Report::new(ranks);
        report.write(folder).map_err(|(path, source)| Error::Write { path, source })?;
        Ok(PHASES.iter().filter_map(|(name, kinds)| Some((*name, peak(&report, kinds)?))).collect())
    }
}

/// Of phases that nothing but a step and its backward pass is around; `None` if there are none.
fn peak(report: &Report, kinds: &[&str]) -> Option<usize> {
    let of_rank = |timeline: &Timeline| {
        let mine = timeline.spans.iter().filter(|span| {
            let path = timeline.path(span.phase);
            let mut path = path.iter().map(|phase| &*phase.kind).filter(|kind| !["step", "backward"].contains(kind));
            span.thread == 0 && path.next().is_some_and(|kind| kinds.contains(&kind)) && path.next().is_none()
        });
        mine.map(|span| span.peak as usize).max()
    };
    report.ranks().iter().filter_map(of_rank).max()
}

/// One rank's recording; it is handed over when this is dropped.
pub(crate) struct RankProfile {
    profiler: Profiler,
    _entered: Entered,
    whole: Arc<Profiling>,
}

impl RankProfile {
    /// A step begins; `None` after the last one.
    pub(crate) fn step(&self, step: Option<usize>) {
        self.profiler.record(step.is_some_and(|step| self.whole.plan.steps.contains(step)));
    }
}

impl Drop for RankProfile {
    fn drop(&mut self) {
        self.whole.done.lock().unwrap_or_else(PoisonError::into_inner).push(self.profiler.finish());
    }
}
