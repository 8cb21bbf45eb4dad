//! The longest sequence that one training step takes under a limit of memory, with one technique after the other: by trying, beside
//! what the planner says.
//!
//! Each try is a process of its own whose address space is limited (`ulimit -v`), running one step of `finetune` on its model from
//! scratch. The text is documents of 512 bytes, which attention does not leave: memory is that of any text, and time grows with
//! the tokens only.

use std::fmt::Write as _;
use std::io;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use burn_upipe::plan::Tokens;
use burn_upipe::profile::heap;
use finetune::{Voice, planned_peak};

/// Bytes of a document.
const DOCUMENT: usize = 512;
/// How near the found length is to the longest one.
const RESOLUTION: f64 = 1.06;
/// Lengths are multiples of this.
const GRAIN: usize = 64;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The limit, GiB of address space.
    #[arg(long, default_value_t = 3.0)]
    gib: f64,
    /// Writes the bar chart here.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Only plans: no process is started.
    #[arg(long)]
    planned_only: bool,
    /// Keeps what was found here, a line for each technique, and goes on from what is there: all of it takes an hour.
    #[arg(long)]
    found: Option<PathBuf>,
}

/// One step of finetune in this process: what `longest` starts, under a limit.
#[derive(clap::Args, Clone, Debug)]
pub struct One {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// One technique more than the one before. No FSDP and no Ulysses: ranks are threads here and share the limit, so that what one has less
/// another has more.
const RUNGS: [(&str, &str); 5] = [
    ("nothing", "--attention single --checkpoint off --mlp-tile off --norm-tile off --loss-tile off"),
    ("+ checkpointing", "--attention single --checkpoint on --mlp-tile off --norm-tile off --loss-tile off"),
    (
        "+ offload to disk",
        "--attention single --checkpoint on --mlp-tile off --norm-tile off --loss-tile off --offload disk",
    ),
    ("+ tiles", "--attention single --checkpoint on --mlp-tile 2048 --norm-tile 2048 --loss-tile 2048 --offload disk"),
    (
        "+ U-Pipe",
        "--attention upipe --ranks 1 --heads-per-stage 1 --checkpoint on --mlp-tile 2048 --norm-tile 2048 --loss-tile 2048 --offload disk",
    ),
];

struct Found {
    name: &'static str,
    planned: usize,
    /// Longest that ran; `None` where nothing was tried.
    measured: Option<usize>,
}

pub fn run(args: &Args) -> Result<String> {
    let cap = (args.gib * f64::from(1u32 << 30)) as usize;
    let folder = tempfile::tempdir()?;
    let text = folder.path().join("documents.jsonl");
    documents(&text)?;
    let step = |rung: &str, seq_len: usize| {
        let out = folder.path().join("out");
        let mut words: Vec<String> =
            ["finetune", "--steps", "1", "--sequences", "1", "--packing", "documents"].map(str::to_owned).into();
        words.extend(["--tokens".to_owned(), "bytes".to_owned(), "--overwrite".to_owned()]);
        words.extend(["--data".to_owned(), text.display().to_string(), "--out".to_owned(), out.display().to_string()]);
        words.extend(["--seq-len".to_owned(), seq_len.to_string()]);
        words.extend(rung.split_whitespace().map(str::to_owned));
        words
    };
    // Code, stacks, text, and what the allocator keeps: of a short run, whose heap is known.
    let outside =
        if args.planned_only { 0 } else { attempt(&step(RUNGS[0].1, 512), None)?.context("a short run failed")? };
    tell(format!("outside the heap: {:.0} MiB of {:.1} GiB", outside as f64 / f64::from(1 << 20), args.gib));

    let mut found = Vec::new();
    for (name, rung) in RUNGS {
        let fits = |seq_len: usize| -> Result<bool> {
            let args = finetune::Args::read(step(rung, seq_len))?;
            Ok(planned_peak(&args)? + outside <= cap)
        };
        let planned = longest(512, 1.1, &fits)?;
        let known = args.found.as_deref().and_then(|path| known(path, name));
        let measured = if args.planned_only || known.is_some() {
            known
        } else {
            let runs = |seq_len: usize| -> Result<bool> {
                let begin = Instant::now();
                let ran = attempt(&step(rung, seq_len), Some(cap))?.is_some();
                let word = if ran { "fits" } else { "does not fit" };
                tell(format!("  {name}: {seq_len} tokens: {word} ({:.0} s)", begin.elapsed().as_secs_f64()));
                Ok(ran)
            };
            // What the allocator loses is not planned.
            Some(longest((planned as f64 / 1.05) as usize, 1.05, &runs)?)
        };
        tell(format!("{name}: planned {planned}, measured {measured:?}"));
        if let (Some(path), Some(measured), None) = (&args.found, measured, known) {
            let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
            writeln!(file, "{name}\t{measured}")?;
        }
        found.push(Found { name, planned, measured });
    }
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["technique", "longest, measured (to 6 %)", "planned", "planned / measured", "times the first"]);
    let first = found[0].measured.unwrap_or(found[0].planned) as f64;
    for rung in &found {
        let length = rung.measured.unwrap_or(rung.planned) as f64;
        let measured = rung.measured.map_or("-".to_owned(), |tokens| tokens.to_string());
        let ratio =
            rung.measured.map_or("-".to_owned(), |tokens| format!("{:.2}", rung.planned as f64 / tokens as f64));
        table.add_row([
            rung.name.to_owned(),
            measured,
            rung.planned.to_string(),
            ratio,
            format!("{:.1}", length / first),
        ]);
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, bars(&found, args.gib)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(table.to_string())
}

/// What an earlier run has found of a technique.
fn known(path: &Path, name: &str) -> Option<usize> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('\t')?.parse().ok())
}

/// Progress, beside the report.
fn tell(line: String) {
    // Nobody need listen.
    let _ = writeln!(io::stderr(), "{line}");
}

/// In the process that was started.
pub fn one(one: &One) -> Result<String> {
    let args = finetune::Args::read(one.words.clone())?;
    finetune::run(&args, &Voice::default())?;
    // What of the address space is not heap.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status
        .lines()
        .find_map(|line| line.strip_prefix("VmPeak:")?.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok());
    Ok(format!("outside {}", peak.unwrap_or(0).saturating_mul(1024).saturating_sub(heap::peak())))
}

/// Runs a step in a process of its own: the bytes that it took outside its heap, or `None` if it did not come through.
fn attempt(words: &[String], cap: Option<usize>) -> Result<Option<usize>> {
    let program = std::env::current_exe()?;
    let limit = cap.map_or("unlimited".to_owned(), |cap| (cap / 1024).to_string());
    let output = Command::new("sh")
        .args(["-c", "ulimit -v \"$1\" && shift && exec \"$@\"", "sh", &limit])
        .arg(program)
        .args(["one", "--"])
        .args(words)
        .stderr(Stdio::piped())
        .output()?;
    if output.status.success() {
        let said = String::from_utf8_lossy(&output.stdout);
        let outside = said.lines().find_map(|line| line.strip_prefix("outside ")?.parse().ok());
        return Ok(Some(outside.context("the step said nothing of its memory")?));
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    // A thread that cannot be made is one, and so is a buffer of the backend's. Anything but want of memory is a fault of this program, and not an answer.
    if !["memory", "Cannot allocate", "os error 12", "os error 11", "bytemuck"].iter().any(|word| stderr.contains(word))
    {
        bail!("a step failed, and not for want of memory: {stderr}");
    }
    Ok(None)
}

/// The longest length for which `fits`, to [`RESOLUTION`], looking from `start` in steps of `factor`.
fn longest(start: usize, factor: f64, fits: &dyn Fn(usize) -> Result<bool>) -> Result<usize> {
    let grain = |length: f64| ((length / GRAIN as f64) as usize).max(1) * GRAIN;
    let (mut low, mut high) = (None, None);
    let mut length = grain(start as f64);
    loop {
        if fits(length)? {
            low = Some(length)
        } else {
            high = Some(length)
        }
        length = match (low, high) {
            (Some(low), Some(high)) if high as f64 / low as f64 <= RESOLUTION || high - low <= GRAIN => return Ok(low),
            (Some(low), Some(high)) => {
                grain((low as f64 * high as f64).sqrt()).clamp(low + GRAIN, (high - GRAIN).max(low + GRAIN))
            }
            (Some(low), None) => grain(low as f64 * factor).max(low + GRAIN),
            (None, Some(high)) if high <= GRAIN => return Ok(0),
            (None, Some(high)) => grain(high as f64 / factor).min(high - GRAIN),
            (None, None) => unreachable!("one of them was just set"),
        };
    }
}

/// Enough for the longest sequence that anybody will try here.
fn documents(path: &Path) -> Result<()> {
    let mut text = String::new();
    for at in 0..(4 << 20) / DOCUMENT {
        let body: String =
            (0..DOCUMENT - 2).map(|i| char::from(b'a' + ((at * 31 + i * i + i / 7) % 26) as u8)).collect();
        writeln!(text, "{{\"text\": \"{body}\"}}")?;
    }
    Ok(std::fs::write(path, text)?)
}

/// Two bars a rung: what was planned, and what ran.
fn bars(found: &[Found], gib: f64) -> String {
    const LEFT: f64 = 150.0;
    const RIGHT: f64 = 620.0;
    const ROW: f64 = 52.0;
    let most = found.iter().flat_map(|rung| [rung.planned, rung.measured.unwrap_or(0)]).max().unwrap_or(1) as f64;
    let height = 78.0 + ROW * found.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 760 {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"760\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"16\" y=\"24\" font-size=\"15\">The longest sequence of one training step in {gib} GiB</text>\n"
    );
    let mut put = |line: String| writeln!(svg, "{line}").expect("text grows");
    for (index, rung) in found.iter().enumerate() {
        let top = 44.0 + ROW * index as f64;
        put(format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", LEFT - 10.0, top + 22.0, rung.name));
        let mut bar = |offset: f64, tokens: usize, color: &str, word: &str| {
            let width = (tokens as f64 / most * (RIGHT - LEFT)).max(1.0);
            put(format!(
                "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"18\" fill=\"{color}\"/>",
                top + offset
            ));
            put(format!(
                "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"12\">{} {word}</text>",
                LEFT + width + 6.0,
                top + offset + 13.5,
                Tokens(tokens)
            ));
        };
        if let Some(measured) = rung.measured {
            bar(0.0, measured, "#0072B2", "measured");
        }
        bar(20.0, rung.planned, "#BBD7EA", "planned");
    }
    put(format!(
        "<text x=\"16\" y=\"{}\" fill=\"#555555\" font-size=\"12\">tokens; 4 blocks 128 wide, f32, AdamW, one rank; address space limited, each bar one technique more</text>",
        height - 12.0
    ));
    svg + "</svg>\n"
}
