//! A profiler hears its rank, whatever threads without one do; and those pay nothing for it. Each in a process of its own, since what
//! decides here, the tape and what `tracing` remembers of places that nobody hears, is the process's.

use std::process::Command;
use std::thread;

use burn::tensor::{Device, Tensor};
use burn_context_parallel::phase;
use burn_upipe::profile::heap::{self, CountingAllocator};
use burn_upipe::profile::{Profiler, RankHeap, Report};
use rstest::rstest;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

#[rstest]
#[case("child_phases_are_heard_that_others_reach_first")]
#[case("child_off_there_is_no_event_no_allocation_and_no_node")]
fn alone(#[case] child: &str) {
    let args = ["--ignored", "--exact", child, "--nocapture"];
    let out = Command::new(std::env::current_exe().unwrap()).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
#[ignore = "alone in its process: run by the test above"]
fn child_phases_are_heard_that_others_reach_first() {
    let profiler = Profiler::new(1, RankHeap::new(1));
    {
        let _on = profiler.enter();
        profiler.record(true);
        let phases = || {
            let _outer = phase::enter("outer", None);
            let _inner = phase::pass("inner", Some(3), phase::Pass::Backward);
            let _copy = phase::copy("copy", 8);
        };
        // A rank that nobody profiles.
        thread::spawn(phases).join().unwrap();
        phases();
    }
    let heard: Vec<_> = Report::new([profiler.finish()]).phases().into_iter().map(|phase| phase.name).collect();
    assert_eq!(heard, ["outer", "inner backward", "copy"]);
}

#[test]
#[ignore = "alone in its process: run by the test above"]
fn child_off_there_is_no_event_no_allocation_and_no_node() {
    let device = Device::flex().autodiff();
    let x = Tensor::<1>::ones([4], &device).require_grad();
    let twice = |x: Tensor<1>| phase::around("twice", None, x, |x| x * 2);
    twice(x.clone());
    let profiler = Profiler::new(33, RankHeap::new(33));
    {
        let _on = profiler.enter();
        profiler.record(true);
    }
    // Its listening is over; this thread's phases are nobody's.
    let _owned = heap::own(34);
    let (mine, allocated) = (heap::in_use_by(34), heap::take_peak_by(34));
    for index in 0..1000 {
        let _phase = phase::enter("phase", Some(index));
        let _pass = phase::pass("stage", Some(index), phase::Pass::Forward);
    }
    assert_eq!((heap::in_use_by(34), heap::take_peak_by(34)), (mine, allocated.min(mine)));
    // As many bytes as without `around`: no step of the tape. The least of many: the tape's own tables grow now and then.
    let kept = |f: &dyn Fn(Tensor<1>) -> Tensor<1>| {
        let once = |_| {
            let before = heap::in_use_by(34);
            let _y = f(x.clone());
            heap::in_use_by(34).saturating_sub(before)
        };
        (0..50).map(once).min()
    };
    let plain = kept(&|x| x * 2);
    assert!(plain > Some(0));
    assert_eq!(kept(&twice), plain);
    assert_eq!(profiler.finish().spans, []);
}
