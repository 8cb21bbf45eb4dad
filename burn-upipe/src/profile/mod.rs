//! Where time and memory went: phases of a rank, recorded, and what was alive in them.
//!
//! [`Profiler`] records one rank's [phases](burn_context_parallel::phase), the [`Report`] of all ranks is a table, a trace and a picture.
//! Without a profiler phases cost nothing. What PyTorch gives, and where it is here:
//!
//! | PyTorch | here |
//! |---|---|
//! | `torch.profiler.profile(schedule=..)` | [`Profiler::record`] for the steps that are to be kept; `finetune --profile DIR --profile-steps 2-3` |
//! | `record_function("name")` | [`phase::enter`](burn_context_parallel::phase::enter), [`phase::around`](burn_context_parallel::phase::around) with the backward pass |
//! | `key_averages().table()` | the [`Report`], printed: `profile.txt` |
//! | `export_chrome_trace` | [`Report::trace`]: `trace.json`, for ui.perfetto.dev or chrome://tracing |
//! | memory_viz, active memory timeline | [`Report::html`]: `memory.html`, by phase and not by stack |
//! | `memory._dump_snapshot` on an OOM observer | [`heap::on_out_of_memory`], [`out_of_memory`]: what was alive by phase |
//! | `max_memory_allocated`, `reset_peak_memory_stats` | [`heap::peak_by`], [`heap::reset_peak`] |
//! | `memory_allocated`, `memory_reserved` | [`MemorySource::read`]: [`RankHeap`], [`DevicePools`], [`ResidentSet`] |
//!
//! ```text
//! rank 0 thread ── phases ──> Profiler 0 ── finish ──> Timeline 0 ─┐
//! rank 1 thread ── phases ──> Profiler 1 ── finish ──> Timeline 1 ─┴─> Report ──> table, trace, picture
//!                                  └─ reads ─> RankHeap | DevicePools | ResidentSet
//! ```

pub mod heap;
mod out_of_memory;
mod picture;
mod profiler;
mod recorder;
mod report;
mod source;
mod timeline;
mod trace;

pub use out_of_memory::{alive, is_out_of_memory, out_of_memory};
pub use profiler::{Entered, Profiler};
pub use report::{FILES, PhaseStats, RankStats, Report};
pub use source::{DevicePools, Memory, MemorySource, RankHeap, ResidentSet, resident};
pub use timeline::{Phase, Sample, Span, Timeline};
