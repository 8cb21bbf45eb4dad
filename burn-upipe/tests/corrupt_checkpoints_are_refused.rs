//! Whatever has happened to a checkpoint's files: a typed error, no panic, no wrong values; and the older whole one is found.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use burn_context_parallel::group::{ProcessGroup, launch};
use burn_upipe::learner::checkpoint::{Checkpoint, CheckpointError, Checkpoints, MANIFEST};
use burn_upipe::profile::heap::{self, CountingAllocator};
use common::{holds, save};
use serde_json::{Value, json};
use tempfile::TempDir;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

const RANKS: usize = 3;

/// All tests of this file together: what a damaged size would ask for is more by far.
const MEMORY: usize = 64 << 20;

/// Steps 1 and 2, the second of which is to be damaged.
struct Damaged {
    out: TempDir,
    older: PathBuf,
    path: PathBuf,
}

impl Damaged {
    fn new() -> Self {
        let out = tempfile::tempdir().unwrap();
        let [older, path] = [1, 2].map(|step| save(out.path(), step, RANKS).unwrap());
        let fresh = Self { out, older, path };
        fresh.is_whole();
        fresh
    }

    /// The guard of everything here: undamaged, it is read.
    fn is_whole(&self) {
        let checkpoint = Checkpoint::open(&self.path).unwrap();
        checkpoint.verify().unwrap();
        holds(&checkpoint, 2).unwrap();
        assert_eq!(self.latest(), Ok(2));
        assert!(heap::peak() < MEMORY, "{} bytes", heap::peak());
    }

    fn files(&self) -> Vec<PathBuf> {
        let ranks = (0..RANKS).map(|rank| format!("rank-{rank:04}-of-{RANKS:04}.safetensors"));
        ranks.chain([MANIFEST.to_owned()]).map(|name| self.path.join(name)).collect()
    }

    fn latest(&self) -> Result<u64, String> {
        let latest = Checkpoints::new(self.out.path(), None).latest(&ProcessGroup::single());
        latest.map(|latest| latest.expect("there are some").step()).map_err(|error| error.to_string())
    }

    /// The error; and that whoever does not ask for all of it gets right values or an error too.
    fn refused(&self, how: &str) -> CheckpointError {
        let opened = Checkpoint::open(&self.path);
        if let Ok(checkpoint) = &opened {
            // Compares all values that it gets.
            let _ = holds(checkpoint, 2);
        }
        let error = opened.and_then(|checkpoint| checkpoint.verify()).expect_err(how);
        assert!(error.to_string().contains("step-0000000002"), "{how}: {error}");
        assert_eq!(self.latest(), Ok(1), "{how}");
        error
    }
}

fn is_damage(error: &CheckpointError) -> bool {
    matches!(error, CheckpointError::Corrupt { .. } | CheckpointError::Foreign { .. } | CheckpointError::Missing { .. })
}

/// 200 in the manifest, 50 in each rank's header, 50 in each rank's values.
#[test]
fn single_bits() {
    let damaged = Damaged::new();
    let mut count = 0;
    for (file, path) in damaged.files().into_iter().enumerate() {
        let whole = fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let regions = match file {
            RANKS => vec![(0..whole.len(), 200)],
            _ => vec![(0..header, 50), (header..whole.len(), 50)],
        };
        for (region, flips) in regions {
            for flip in 0..flips {
                // Spread evenly, the first and the last bit among them.
                let bit = (region.len() * 8 - 1) * flip / (flips - 1);
                let mut bytes = whole.clone();
                bytes[region.start + bit / 8] ^= 1 << (bit % 8);
                fs::write(&path, &bytes).unwrap();
                let error = damaged.refused(&format!("{} bit {bit} of {region:?}", path.display()));
                assert!(is_damage(&error), "{error:?}");
                count += 1;
            }
        }
        fs::write(&path, whole).unwrap();
    }
    assert_eq!(count, 500);
    damaged.is_whole();
}

#[test]
fn files_cut_short_or_too_long() {
    let damaged = Damaged::new();
    for path in damaged.files() {
        let whole = fs::read(&path).unwrap();
        let lengths = (0..100).chain((100..whole.len()).step_by(37)).chain([whole.len() - 2, whole.len() - 1]);
        for length in lengths {
            fs::write(&path, &whole[..length]).unwrap();
            let error = damaged.refused(&format!("{} cut to {length}", path.display()));
            assert!(is_damage(&error), "{error:?}");
        }
        for more in [&b"\n"[..], b"\0", &[0; 4096]] {
            fs::write(&path, [&whole, more].concat()).unwrap();
            let error = damaged.refused(&format!("{} with {} more bytes", path.display(), more.len()));
            assert!(matches!(error, CheckpointError::Corrupt { .. }), "{error:?}");
        }
        fs::write(&path, whole).unwrap();
    }
    damaged.is_whole();
}

#[test]
fn files_that_are_gone_or_something_else() {
    let damaged = Damaged::new();
    for path in damaged.files() {
        let whole = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let error = damaged.refused("gone");
        assert!(matches!(&error, CheckpointError::Missing { path: missing, .. } if *missing == path), "{error:?}");
        fs::create_dir(&path).unwrap();
        let error = damaged.refused("a folder");
        assert!(matches!(&error, CheckpointError::Foreign { file, .. } if *file == path), "{error:?}");
        fs::remove_dir(&path).unwrap();
        for foreign in [
            "",
            "{}",
            "null",
            "hello\n",
            "{\"format\":\"another\"}",
            "{\"format\":\"burn-upipe checkpoint\",\"version\":9}",
        ] {
            fs::write(&path, foreign).unwrap();
            assert!(is_damage(&damaged.refused(foreign)));
        }
        fs::write(&path, whole).unwrap();
    }
    damaged.is_whole();
}

/// Each file is a good one, in the wrong place.
#[test]
fn files_that_changed_places() {
    let damaged = Damaged::new();
    let files = damaged.files();
    for (i, a) in files.iter().enumerate() {
        for b in files[..i].iter().chain([&damaged.older.join(a.file_name().unwrap())]) {
            let (of_a, of_b) = (fs::read(a).unwrap(), fs::read(b).unwrap());
            if of_a == of_b {
                continue;
            }
            fs::write(a, &of_b).unwrap();
            let opened = Checkpoint::open(&damaged.path).and_then(|checkpoint| checkpoint.verify());
            assert!(opened.as_ref().is_err_and(is_damage), "{} has what {} had: {opened:?}", a.display(), b.display());
            assert_eq!(damaged.latest(), Ok(1));
            fs::write(a, of_a).unwrap();
        }
    }
    damaged.is_whole();
}

#[test]
fn folders_that_were_renamed() {
    let damaged = Damaged::new();
    fs::rename(&damaged.path, damaged.out.path().join("step-0000000009")).unwrap();
    assert_eq!(damaged.latest(), Ok(1));
    // Other names are no checkpoints of the run; by its path any can be opened.
    let aside = damaged.out.path().join("best");
    fs::rename(damaged.out.path().join("step-0000000009"), &aside).unwrap();
    holds(&Checkpoint::open(aside).unwrap(), 2).unwrap();
}

#[test]
fn none_that_is_whole() {
    let damaged = Damaged::new();
    fs::remove_file(damaged.older.join(MANIFEST)).unwrap();
    fs::write(damaged.path.join(MANIFEST), "").unwrap();
    let folder = damaged.out.path().to_owned();
    // All ranks say the same.
    let errors = launch(3, move |world| {
        Ok::<_, CheckpointError>(Checkpoints::new(&folder, None).latest(&world).expect_err("none is whole"))
    });
    for error in errors.unwrap() {
        let CheckpointError::NoneWhole { problems, .. } = &error else { panic!("{error:?}") };
        assert_eq!(problems.iter().map(|(path, _)| path).collect::<Vec<_>>(), [&damaged.path, &damaged.older]);
        assert!(error.to_string().contains("is missing") && error.to_string().contains("is damaged"), "{error}");
    }
}

/// The manifest as it would be if somebody had written this on purpose, checksum and all.
fn forge(path: &Path, change: impl FnOnce(&mut Value)) {
    let path = path.join(MANIFEST);
    let mut whole: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut whole["manifest"]);
    seal(&path, &serde_json::to_string(&whole["manifest"]).unwrap());
}

fn seal(path: &Path, body: &str) {
    let digest = blake3::hash(body.as_bytes()).to_hex();
    let frame = "{\"format\":\"burn-upipe checkpoint\",\"version\":1,\"blake3\":";
    fs::write(path, format!("{frame}\"{digest}\",\"manifest\":{body}}}\n")).unwrap();
}

#[test]
fn manifests_that_cannot_be() {
    let damaged = Damaged::new();
    let whole = fs::read(damaged.path.join(MANIFEST)).unwrap();
    // A forged manifest that says the truth is read: what follows is refused for what it says.
    forge(&damaged.path, |_| ());
    damaged.is_whole();

    type Change = fn(&mut Value);
    let huge = u64::MAX >> 1;
    let changes: &[(&str, Change)] = &[
        ("a file elsewhere", |m| m["files"][0]["name"] = json!("../step-0000000001/rank-0000-of-0003.safetensors")),
        ("an absolute path", |m| m["files"][0]["name"] = json!("/etc/passwd")),
        ("files in another order", |m| m["files"].as_array_mut().unwrap().swap(0, 1)),
        ("no files", |m| m["files"] = json!([])),
        ("a file less", |m| drop(m["files"].as_array_mut().unwrap().pop())),
        ("a file that is larger than any", |m| m["files"][1]["size"] = json!(u64::MAX)),
        ("a size that is no number", |m| m["files"][1]["size"] = json!("12")),
        ("a negative size", |m| m["files"][1]["size"] = json!(-1)),
        ("a header larger than the file", |m| m["files"][0]["header"]["size"] = json!(u64::MAX)),
        ("a header of nothing", |m| m["files"][0]["header"]["size"] = json!(0)),
        ("a shape that overflows", |m| m["tensors"][0]["shape"] = json!([u32::MAX, u32::MAX, u32::MAX])),
        ("a shape whose bytes overflow", |m| m["tensors"][0]["shape"] = json!([u64::MAX >> 1])),
        ("a shape that no memory holds", |m| m["tensors"][0]["shape"] = json!([1u64 << 50])),
        ("a shape that is larger", |m| m["tensors"][0]["shape"] = json!([7, 6])),
        ("a shape that is smaller", |m| m["tensors"][0]["shape"] = json!([7, 4])),
        ("another element type", |m| m["tensors"][0]["dtype"] = json!("F64")),
        ("an element type that is not saved", |m| m["tensors"][0]["dtype"] = json!("F4")),
        ("an element type that is none", |m| m["tensors"][0]["dtype"] = json!("F33")),
        ("a tensor twice", |m| {
            let tensors = m["tensors"].as_array_mut().unwrap();
            tensors.insert(0, tensors[0].clone());
        }),
        ("a tensor less", |m| drop(m["tensors"].as_array_mut().unwrap().remove(0))),
        ("a tensor that nobody saved", |m| {
            let more = json!({ "name": "z", "dtype": "F32", "shape": [1u64 << 40] });
            m["tensors"].as_array_mut().unwrap().push(more);
        }),
        ("a piece less", |m| drop(m["files"][0]["pieces"].as_array_mut().unwrap().pop())),
        ("a piece twice", |m| {
            let pieces = m["files"][0]["pieces"].as_array_mut().unwrap();
            pieces.push(pieces[0].clone());
        }),
        ("a piece of another tensor", |m| m["files"][0]["pieces"][0]["tensor"] = json!("block.9.weight")),
        ("a piece that ends before it begins", |m| m["files"][0]["pieces"][0]["range"] = json!([9, 3])),
        ("an empty piece", |m| m["files"][0]["pieces"][0]["range"] = json!([3, 3])),
        ("a piece that is longer", |m| m["files"][0]["pieces"][0]["range"][1] = json!(u64::MAX)),
        ("a piece that begins elsewhere", |m| m["files"][0]["pieces"][0]["range"][0] = json!(1)),
        ("bytes that overlap", |m| m["files"][0]["pieces"][1]["bytes"][0] = json!(0)),
        ("bytes after the end", |m| m["files"][0]["pieces"][1]["bytes"] = json!([u64::MAX - 8, u64::MAX])),
        ("bytes that are the header's", |m| m["files"][0]["pieces"][0]["bytes"] = json!([0, 8])),
        ("another digest", |m| m["files"][0]["pieces"][0]["blake3"] = json!("00")),
        ("a field more", |m| m["more"] = json!(1)),
        ("a state that is none", |m| m["state"] = json!([1, 2])),
        ("a state without a step", |m| drop(m["state"].as_object_mut().unwrap().remove("step"))),
        ("a step that is no number", |m| m["state"]["step"] = json!("~0.5")),
        ("a float that is none", |m| m["state"]["data"] = json!("~nothing")),
        ("a float that is infinite", |m| m["state"]["data"] = json!("~inf")),
        ("nothing", |m| *m = Value::Null),
    ];
    for (how, change) in changes {
        forge(&damaged.path, change);
        let error = damaged.refused(how);
        assert!(matches!(error, CheckpointError::Corrupt { .. }), "{how}: {error:?}");
        fs::write(damaged.path.join(MANIFEST), &whole).unwrap();
    }
    for body in
        ["", "[", &"[".repeat(100_000), &format!("{{\"state\":{huge}}}"), "\"\u{1}\"", "{\"state\":1,\"state\":2}"]
    {
        seal(&damaged.path.join(MANIFEST), body);
        let error = damaged.refused("a manifest that is no JSON");
        assert!(matches!(error, CheckpointError::Corrupt { .. }), "{error:?}");
    }
    fs::write(damaged.path.join(MANIFEST), whole).unwrap();
    damaged.is_whole();
}

/// Sizes are looked at before anything is allocated or read.
#[test]
fn files_that_are_absurdly_large() {
    let damaged = Damaged::new();
    for path in damaged.files() {
        let whole = fs::read(&path).unwrap();
        // Sparse: it has no blocks on disk.
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(is_damage(&damaged.refused("a file of 1 TiB")));
        fs::write(&path, whole).unwrap();
    }
    damaged.is_whole();
}
