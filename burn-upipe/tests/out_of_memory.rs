//! When memory is out, somebody is told, once, before the process ends: what was in it by phase.
//!
//! A program of its own, which runs itself: what it is to do ends it.

#![allow(clippy::print_stdout)]

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use burn_context_parallel::phase;
use burn_upipe::profile::heap::{self, CountingAllocator};
use burn_upipe::profile::{Profiler, RankHeap, out_of_memory};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

const MIB: usize = 1 << 20;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [child, path] = &args[..]
        && let Some((_, run)) = CHILDREN.iter().find(|(name, _)| name == child)
    {
        return run(Path::new(path));
    }
    what_is_written_names_the_phase_that_holds_most();
    threads_that_fail_together_wait_for_the_report();
    a_program_that_can_do_without_goes_on_and_is_told_once();
    a_report_that_panics_ends_nothing_else();
    a_report_takes_the_place_of_another_and_is_told();
    a_report_that_is_armed_while_another_runs_is_told();
    something_armed_is_always_told();
    println!("7 properties held");
    ExitCode::SUCCESS
}

type Child = fn(&Path) -> ExitCode;
const CHILDREN: [(&str, Child); 7] = [
    ("full", full),
    ("together", together),
    ("survives", survives),
    ("panics", panics),
    ("replaced", replaced),
    ("meanwhile", meanwhile),
    ("always", always),
];

fn child(name: &str) -> (ExitStatus, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report");
    let output = Command::new(std::env::current_exe().unwrap()).arg(name).arg(&path).output().unwrap();
    let report = fs::read_to_string(&path).unwrap_or_default();
    println!("{name}: {}, {}\n{report}", output.status, String::from_utf8_lossy(&output.stderr));
    (output.status, report)
}

/// Lets allocations fail above so much more than there is.
fn room(bytes: usize) {
    heap::limit(Some(heap::in_use() + bytes));
}

fn hold(bytes: usize) -> Vec<u8> {
    std::hint::black_box(vec![1; bytes])
}

fn full(path: &Path) -> ExitCode {
    let path = path.to_owned();
    let _armed = heap::on_out_of_memory(move |bytes| {
        fs::write(path, out_of_memory(&format!("an allocation of {bytes} bytes failed"))).unwrap();
    });
    let profiler = Profiler::new(3, RankHeap::new(3));
    let _on = profiler.enter();
    let _step = phase::enter("step", Some(1));
    let mut held = Vec::new();
    {
        let _small = phase::enter("small", None);
        held.push(hold(5 * MIB));
    }
    for block in 0..4 {
        let _block = phase::pass("block", Some(block), phase::Pass::Forward);
        held.push(hold(10 * MIB));
    }
    room(15 * MIB);
    let _growing = phase::enter("growing", None);
    held.push(hold(10 * MIB));
    held.push(hold(20 * MIB));
    // Not reached.
    ExitCode::SUCCESS
}

fn what_is_written_names_the_phase_that_holds_most() {
    let (status, report) = child("full");
    assert!(!status.success());
    let lines: Vec<&str> = report.lines().collect();
    assert!(lines[0].starts_with("out of memory: an allocation of 20971520 bytes failed in rank 3, growing"));
    let alive = lines.iter().position(|line| line.starts_with("alive by")).unwrap();
    assert_eq!(lines[alive + 1].trim(), "40.0 MiB  rank 3    block forward");
    assert_eq!(lines[alive + 2].trim(), "10.0 MiB  rank 3    growing");
    assert_eq!(lines[alive + 3].trim(), "5.0 MiB  rank 3    small");
}

static REPORTS: AtomicUsize = AtomicUsize::new(0);

fn together(path: &Path) -> ExitCode {
    let path = path.to_owned();
    let _armed = heap::on_out_of_memory(move |_| {
        // The others fail meanwhile; whoever of them were to end the process would cut this short.
        thread::sleep(Duration::from_millis(300));
        let reports = REPORTS.fetch_add(1, Ordering::Relaxed) + 1;
        // More than the reserve, and beyond the limit: whoever reports may.
        drop(hold(8 * MIB));
        fs::write(path, format!("{reports} whole")).unwrap();
    });
    room(MIB);
    let threads: Vec<_> = (0..8).map(|_| thread::spawn(|| drop(hold(50 * MIB)))).collect();
    for thread in threads {
        let _ = thread.join();
    }
    ExitCode::SUCCESS
}

fn threads_that_fail_together_wait_for_the_report() {
    let (status, report) = child("together");
    assert!(!status.success());
    assert_eq!(report, "1 whole");
}

fn survives(path: &Path) -> ExitCode {
    let path = path.to_owned();
    let armed = heap::on_out_of_memory(move |bytes| {
        let reports = REPORTS.fetch_add(1, Ordering::Relaxed) + 1;
        fs::write(path, format!("{reports} of {bytes}")).unwrap();
    });
    room(2 * MIB);
    for _ in 0..2 {
        assert!(Vec::<u8>::new().try_reserve_exact(10 * MIB).is_err());
    }
    // The reserve is free by now. Grown ones exist twice for a moment: 1.5 + 2 is too much, 1 + 1.5 is not.
    let mut grown = hold(MIB);
    assert!(grown.try_reserve_exact(MIB / 2).is_ok());
    assert!(grown.try_reserve_exact(MIB).is_err());
    assert_eq!((grown.len(), grown[MIB - 1]), (MIB, 1));
    heap::limit(None);
    drop(hold(10 * MIB));
    // Disarmed, nobody is told.
    drop(armed);
    drop(heap::on_out_of_memory(|_| std::process::exit(3)));
    room(MIB);
    assert!(Vec::<u8>::new().try_reserve_exact(10 * MIB).is_err());
    heap::limit(None);
    ExitCode::SUCCESS
}

fn a_program_that_can_do_without_goes_on_and_is_told_once() {
    let (status, report) = child("survives");
    assert!(status.success());
    assert_eq!(report, "1 of 10485760");
}

fn panics(path: &Path) -> ExitCode {
    let _armed = heap::on_out_of_memory(|_| panic!("in the report"));
    room(MIB);
    assert!(Vec::<u8>::new().try_reserve_exact(10 * MIB).is_err());
    heap::limit(None);
    fs::write(path, "went on").unwrap();
    ExitCode::SUCCESS
}

fn a_report_that_panics_ends_nothing_else() {
    let (status, report) = child("panics");
    assert!(status.success());
    assert_eq!(report, "went on");
}

/// Fails, and goes on.
fn fail() {
    assert!(Vec::<u8>::new().try_reserve_exact(10 * MIB).is_err());
}

/// A report that only counts.
fn count(by: usize) -> heap::Armed {
    heap::on_out_of_memory(move |_| {
        REPORTS.fetch_add(by, Ordering::Relaxed);
    })
}

fn replaced(path: &Path) -> ExitCode {
    let mut armed = count(1);
    room(4 * MIB);
    fail();
    // As one arms again after a report: the guard before goes when the new one is there. And before one.
    for by in [10, 100, 1000] {
        drop(std::mem::replace(&mut armed, count(by)));
        if by != 10 {
            fail();
        }
    }
    drop(armed);
    fail();
    heap::limit(None);
    fs::write(path, REPORTS.load(Ordering::Relaxed).to_string()).unwrap();
    ExitCode::SUCCESS
}

fn a_report_takes_the_place_of_another_and_is_told() {
    let (status, report) = child("replaced");
    assert!(status.success());
    assert_eq!(report, "1101");
}

fn meanwhile(path: &Path) -> ExitCode {
    let (begun, begins) = mpsc::channel();
    let (arm, armed) = mpsc::channel();
    let first = heap::on_out_of_memory(move |_| {
        begun.send(()).unwrap();
        armed.recv_timeout(Duration::from_secs(60)).unwrap();
        REPORTS.fetch_add(1, Ordering::Relaxed);
    });
    room(4 * MIB);
    let failing = thread::spawn(fail);
    begins.recv_timeout(Duration::from_secs(60)).unwrap();
    let second = count(10);
    // The guard of the one that runs ends nothing of it, nor of the second.
    drop(first);
    // This one waits for the report, or it would end the process in the middle of it.
    let waiting = thread::spawn(|| {
        fail();
        REPORTS.load(Ordering::Relaxed)
    });
    thread::sleep(Duration::from_millis(50));
    arm.send(()).unwrap();
    failing.join().unwrap();
    let at_least = waiting.join().unwrap();
    fail();
    drop(second);
    heap::limit(None);
    let reports = REPORTS.load(Ordering::Relaxed);
    fs::write(path, format!("{} {reports}", at_least % 10)).unwrap();
    ExitCode::SUCCESS
}

fn a_report_that_is_armed_while_another_runs_is_told() {
    let (status, report) = child("meanwhile");
    assert!(status.success());
    assert_eq!(report, "1 11");
}

/// One thread arms again and again while another one fails.
fn always(path: &Path) -> ExitCode {
    static TIMES: AtomicUsize = AtomicUsize::new(0);
    static OVER: AtomicBool = AtomicBool::new(false);
    let arming = thread::spawn(|| {
        let mut armed = count(1);
        while !OVER.load(Ordering::Relaxed) {
            drop(std::mem::replace(&mut armed, count(1)));
            TIMES.fetch_add(1, Ordering::Release);
        }
    });
    room(5 * MIB);
    let mut told = 0;
    for _ in 0..1000 {
        // One that was begun before now, and one more, which is armed for certain.
        let times = TIMES.load(Ordering::Acquire) + 2;
        while TIMES.load(Ordering::Acquire) < times {
            thread::yield_now();
        }
        let before = REPORTS.load(Ordering::Relaxed);
        fail();
        told += usize::from(REPORTS.load(Ordering::Relaxed) == before + 1);
    }
    OVER.store(true, Ordering::Relaxed);
    arming.join().unwrap();
    heap::limit(None);
    fs::write(path, told.to_string()).unwrap();
    ExitCode::SUCCESS
}

fn something_armed_is_always_told() {
    let (status, report) = child("always");
    assert!(status.success());
    assert_eq!(report, "1000");
}
