//! Ranks save and end at the same step, whoever was asked, and however.

use std::fs;

use burn_context_parallel::group::launch;
use burn_upipe::learner::stop::{Decision, SaveNow, Stop};
use rstest::rstest;

const ALL: [Decision; 3] = [Decision::Continue, Decision::Save, Decision::SaveAndStop];

#[test]
fn the_most_that_any_rank_wants() {
    for case in 0..27 {
        let wanted = [case % 3, case / 3 % 3, case / 9].map(|i| ALL[i]);
        let agreed = launch(3, move |world| wanted[world.rank()].agree(&world)).unwrap();
        assert_eq!(agreed, [*wanted.iter().max().unwrap(); 3], "{wanted:?}");
    }
    assert_eq!(launch(1, |world| Decision::Save.agree(&world)).unwrap(), [Decision::Save]);
}

/// A loop as trainings have it; what each rank did.
#[test]
fn a_file_asks_for_one_save() {
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().to_owned();
    let done = launch(2, move |world| {
        let (stop, save_now) = (Stop::new(), SaveNow::in_folder(&folder));
        let mut done = Vec::new();
        for step in 0..6 {
            // Somebody else, at any time; and somebody on one rank.
            world.barrier()?;
            if world.rank() == 1 && step == 2 {
                fs::write(save_now.path(), "").unwrap();
            }
            if world.rank() == 1 && step == 4 {
                stop.clone().request();
            }
            let decision = Decision::wanted(&stop, &save_now).agree(&world)?;
            world.barrier()?;
            if decision != Decision::Continue && world.rank() == 0 {
                save_now.served().unwrap();
            }
            done.push(decision);
            if decision == Decision::SaveAndStop {
                break;
            }
        }
        assert!(!save_now.requested());
        save_now.served().unwrap();
        Ok::<_, burn_context_parallel::Error>(done)
    })
    .unwrap();
    let expected = [Decision::Continue, Decision::Continue, Decision::Save, Decision::Continue, Decision::SaveAndStop];
    assert_eq!(done, [expected, expected]);
}

#[cfg(unix)]
mod signals {
    use std::io::{BufRead, BufReader, Lines};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, ChildStdout, Command, Stdio};
    use std::time::Duration;

    use super::*;

    #[expect(clippy::print_stdout, reason = "the parent listens")]
    fn say(what: &str) {
        println!("\nnow {what}");
    }

    fn wait_for(stop: &Stop) {
        while !stop.requested() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    #[ignore = "waits for signals: run by the tests below"]
    fn child_ends() {
        let stop = Stop::on_signals().unwrap();
        say("running");
        wait_for(&stop);
        // Where a run saves.
        say("asked");
    }

    #[test]
    #[ignore = "waits for signals: run by the tests below"]
    fn child_is_stuck() {
        let stop = Stop::on_signals().unwrap();
        say("running");
        wait_for(&stop);
        say("asked");
        loop {
            std::thread::park();
        }
    }

    #[test]
    #[ignore = "waits for signals: run by the tests below"]
    fn child_has_stopped_listening() {
        drop(Stop::on_signals().unwrap());
        say("running");
        loop {
            std::thread::park();
        }
    }

    struct Run(Child, Lines<BufReader<ChildStdout>>);

    impl Run {
        fn start(name: &str) -> Self {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", &format!("signals::{name}"), "--nocapture"])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let mut run = Self(child, lines);
            run.hears("running");
            run
        }

        fn hears(&mut self, what: &str) {
            let line = format!("now {what}");
            assert!(self.1.by_ref().map_while(Result::ok).any(|said| said == line), "it never said {what}");
        }

        fn send(&self, signal: &str) {
            let sent = Command::new("kill").args([format!("-{signal}"), self.0.id().to_string()]).status();
            assert!(sent.unwrap().success());
        }
    }

    #[rstest]
    fn the_first_asks(#[values("INT", "TERM")] signal: &str) {
        let mut run = Run::start("child_ends");
        run.send(signal);
        run.hears("asked");
        assert!(run.0.wait().unwrap().success(), "exit 0");
    }

    #[rstest]
    fn the_second_ends(#[values(("INT", 2), ("TERM", 15))] second: (&str, i32), #[values("INT", "TERM")] first: &str) {
        let mut run = Run::start("child_is_stuck");
        run.send(first);
        run.hears("asked");
        run.send(second.0);
        assert_eq!(run.0.wait().unwrap().signal(), Some(second.1));
    }

    #[test]
    fn without_a_listener_the_first_ends() {
        let mut run = Run::start("child_has_stopped_listening");
        run.send("TERM");
        assert_eq!(run.0.wait().unwrap().signal(), Some(15));
    }
}
