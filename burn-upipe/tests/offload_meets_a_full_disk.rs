//! A disk that takes no more while a tensor is written: a typed error that says so, and the process goes on.
//!
//! The system's own limit on the size of files stands in for the disk.
#![cfg(unix)]

mod offload;

use std::io::ErrorKind;
use std::process::Command;

use burn_upipe::offload::{DiskAction, Offload, OffloadConfig, OffloadError};
use offload::{disk_in, filled, on_disk};

/// In a process whose files may have 64 KiB; its folder is the working directory.
#[test]
#[ignore = "needs a limit: run by `a_full_disk_is_an_error`"]
fn saves_under_a_limit() {
    let config = on_disk(OffloadConfig::new().with_in_flight(1), None).with_disk(disk_in(".".as_ref(), None));
    let offload = Offload::new(config).unwrap();
    // Files of 16 KiB: four fit. The fifth is found out by the next save, or when it is asked for.
    let mut saved = Vec::new();
    let error = loop {
        match offload.save(filled(4096, saved.len() as f32)) {
            Ok(tensor) => saved.push(tensor),
            Err(error) => break error,
        }
        assert!(saved.len() < 9, "no limit");
    };
    assert!(
        matches!(
            &error,
            OffloadError::Disk { action: DiskAction::Writing, kind: ErrorKind::FileTooLarge, bytes: 16384, .. }
        ),
        "{error:?}"
    );
    // What was written is there, and so is what had not left yet; one at least did not come through.
    let mut refused = 0;
    while let Some(tensor) = saved.pop() {
        match tensor.take() {
            Ok(tensor) => assert!(tensor.into_data().iter::<f32>().all(|x| x == saved.len() as f32)),
            Err(again) => {
                assert_eq!(again, error);
                refused += 1;
            }
        }
    }
    assert!(refused > 0);
    assert_eq!((offload.stats().saved, offload.stats().disk_bytes), (0, 0));
    println!("\nrefused: {error}");
}

#[test]
fn a_full_disk_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    // In blocks of 512 or 1024 bytes, as the shell has it. The signal would end the process where an error is due.
    let script = r#"trap "" XFSZ; ulimit -f 64; exec "$0" --ignored --exact saves_under_a_limit --nocapture"#;
    let run =
        Command::new("sh").args(["-c", script]).arg(std::env::current_exe().unwrap()).current_dir(&folder).output();
    let run = run.unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success() && said.contains("refused: offload: writing 16384 bytes"), "{said}");
    assert!(said.contains("free space there"), "{said}");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a file without a name");
}
