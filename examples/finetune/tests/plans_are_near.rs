//! What a run says that it would take is near what it took, and both are printed: in all, by phase, and of what waits elsewhere.

use std::process::Command;

/// Whole lines of what a run prints.
fn finetune(args: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let args = format!("--seq-len 1024 --sequences 8 --steps 3 {args} --out out");
    let out =
        Command::new(env!("CARGO_BIN_EXE_finetune")).current_dir(folder.path()).args(args.split_whitespace()).output();
    let out = out.unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().lines().map(str::to_owned).collect()
}

fn line<'a>(lines: &'a [String], start: &str) -> &'a str {
    lines.iter().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("no {start} in\n{}", lines.join("\n")))
}

/// In front of a word, as the planner writes bytes.
fn bytes(line: &str, before: &str) -> f64 {
    let words: Vec<&str> = line.split([' ', ',', ';']).filter(|word| !word.is_empty()).collect();
    let at = words.iter().position(|word| *word == before).unwrap_or_else(|| panic!("no {before} in {line}"));
    number(words[at - 2], words[at - 1])
}

fn number(number: &str, unit: &str) -> f64 {
    let power = ["B", "KiB", "MiB", "GiB"].iter().position(|known| *known == unit);
    number.parse::<f64>().unwrap() * 1024f64.powi(power.unwrap_or_else(|| panic!("{unit} is no unit")) as i32)
}

fn assert_near(planned: f64, counted: f64, what: &str) {
    assert!(counted > 0.0 && (planned / counted - 1.0).abs() <= 0.1, "{what}");
}

#[test]
fn the_peak_is_within_10_percent_of_the_plan() {
    for args in
        ["", "--ranks 2", "--ranks 2 --fsdp", "--ranks 2 --attention ulysses --mlp-tile off", "--checkpoint off"]
    {
        let lines = finetune(args);
        let counted = line(&lines, "memory of a rank at its peak: ");
        let planned = bytes(counted, "planned");
        assert_near(planned, bytes(counted, "counted"), &format!("{args}: {counted}"));
        // What was said before the first step.
        let said = lines.iter().find(|line| line.contains(" planned for a rank at the peak of a step"));
        assert_eq!(bytes(said.unwrap_or_else(|| panic!("{lines:?}")), "planned"), planned, "{args}");
    }
}

#[test]
fn a_profile_has_every_phase_beside_its_plan() {
    // Of the third step: before it moments, or the weights of the last good step, are not the rank's own yet.
    let lines = finetune("--ranks 2 --profile profile --profile-steps 3");
    let from = lines.iter().position(|line| line.starts_with("memory by phase")).unwrap();
    let rows: Vec<(String, f64, f64)> = lines[from + 1..]
        .iter()
        .take_while(|line| !line.is_empty())
        .map(|line| {
            let (name, rest) = line.split_at(20);
            let words: Vec<&str> = rest.split_whitespace().collect();
            (name.trim().to_owned(), number(words[0], words[1]), number(words[2], words[3]))
        })
        .collect();
    let names: Vec<&str> = rows.iter().map(|(name, ..)| &**name).collect();
    let all = ["embedding", "forward", "loss", "loss backward", "backward", "embedding backward", "optimizer"];
    assert_eq!(names, all);
    for (name, counted, planned) in &rows {
        assert_near(*planned, *counted, &format!("{name}: {}", lines[from..].join("\n")));
    }
}

#[test]
fn what_waits_is_as_planned() {
    let of = |args: &str| {
        let lines = finetune(args);
        let line = line(&lines, "block inputs of a rank that waited: ");
        let (host, disk) = line.split_once("; on disk ").unwrap();
        [host, disk].map(|place| {
            let (counted, planned) = (bytes(place, "counted"), bytes(place, "planned"));
            assert!(counted == planned, "{args}: {line}");
            counted
        })
    };
    for ranks in ["--ranks 2", "--ranks 1 --offload-every 2"] {
        let [host, nothing] = of(&format!("{ranks} --offload host"));
        assert!(host > 0.0 && nothing == 0.0, "{ranks}");
        assert_eq!(of(&format!("{ranks} --offload disk")), [0.0, host]);
    }
}
