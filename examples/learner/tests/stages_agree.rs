//! Every stage of the example gives the losses of the plain one, whatever its techniques and ranks.

use std::fs;
use std::path::Path;

use clap::Parser;
use learner::cli::Args;
use learner::train::run;

/// The losses that burn-train has logged of a split, step by step over all epochs; without the epochs' own.
fn losses(out: &Path, split: &str, epochs: usize) -> Vec<f64> {
    let epoch = |epoch| {
        let path = out.join(format!("{split}/epoch-{epoch}/Loss.log"));
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let text: Vec<String> = (1..=epochs).map(epoch).collect();
    let entries = text.iter().flat_map(|text| text.lines()).filter(|line| !line.contains("final"));
    entries.map(|line| line.split(',').next().unwrap().parse().unwrap()).collect()
}

fn train(arguments: &[&str]) -> (Vec<f64>, Vec<f64>) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let fixed = ["learner", "--log", "--epochs", "2", "--seq-len", "50", "--sequences", "9", "--out"];
    let arguments = fixed.into_iter().chain([out.to_str().unwrap()]).chain(arguments.iter().copied());
    run(&Args::try_parse_from(arguments).unwrap()).unwrap();
    assert!(fs::read_dir(&out).unwrap().any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with("model")));
    (losses(&out, "train", 2), losses(&out, "valid", 2))
}

#[test]
fn all_stages_give_the_losses_of_the_plain_one() {
    let (plain, plain_valid) = train(&["--stage", "plain"]);
    assert_eq!((plain.len(), plain_valid.len()), (2 * 4, 2));
    assert!(plain[7] < plain[0] - 0.5, "it has not learned: {plain:?}");
    for arguments in [
        &["--stage", "flash"][..],
        &["--stage", "context-parallel", "--ranks", "2"],
        &["--stage", "context-parallel", "--ranks", "2", "--data-ranks", "2"],
        &["--stage", "upipe", "--ranks", "3"],
        &["--stage", "all", "--ranks", "2"],
        &["--stage", "all", "--ranks", "2", "--data-ranks", "2"],
    ] {
        let (got, valid) = train(arguments);
        assert_eq!(got.len(), plain.len(), "{arguments:?}");
        for (got, plain) in got.iter().zip(&plain).chain(valid.iter().zip(&plain_valid)) {
            assert!((got - plain).abs() < 1e-3, "{arguments:?}: {got} instead of {plain}");
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("here"), "before").unwrap();
    let refused = |arguments: &[&str], expected: &str| {
        let out = ["learner", "--log", "--out", folder.path().to_str().unwrap()];
        let args = Args::try_parse_from(out.into_iter().chain(arguments.iter().copied())).unwrap();
        let error = format!("{:#}", run(&args).unwrap_err());
        assert!(error.contains(expected), "{arguments:?}: {error}");
    };
    refused(&[], "name a new folder");
    refused(&["--stage", "plain", "--ranks", "2"], "one device");
    refused(&["--ranks", "0"], "ulysses=0");
    refused(&["--seq-len", "1"], "at least 2");
    refused(&["--seq-len", "100000"], "shorter --seq-len");
    refused(&["--data-ranks", "3"], "use a multiple");
    refused(&["--epochs", "0"], "at least 1");
    refused(&["--text", "/no/such/file"], "/no/such/file");
}
