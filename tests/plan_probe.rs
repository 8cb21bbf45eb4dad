#![allow(missing_docs, clippy::print_stdout)]
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::Batch;
use burn_upipe::upipe::AttentionScheme;
use llama::{Llama, LlamaConfig, ParallelConfig};

const N: usize = 512;
struct State {
    sizes: [(usize, isize); N],
    used: usize,
    total: usize,
    peak: usize,
    snap: [(usize, isize); N],
    snap_used: usize,
}
static STATE: Mutex<State> =
    Mutex::new(State { sizes: [(0, 0); N], used: 0, total: 0, peak: 0, snap: [(0, 0); N], snap_used: 0 });
static ON: AtomicBool = AtomicBool::new(false);
static SMALL: AtomicUsize = AtomicUsize::new(0);
fn note(size: usize, by: isize) {
    if size < 4096 {
        SMALL.fetch_add(1, SeqCst);
        return;
    }
    let mut s = STATE.lock().unwrap();
    let used = s.used;
    let at = match s.sizes[..used].iter().position(|(x, _)| *x == size) {
        Some(at) => at,
        None => {
            if used >= N {
                return;
            }
            s.sizes[used] = (size, 0);
            s.used += 1;
            used
        }
    };
    s.sizes[at].1 += by;
    if by > 0 {
        s.total = s.total.wrapping_add(size);
    } else {
        s.total = s.total.wrapping_sub(size);
    }
    if s.total > s.peak && (s.total as isize) > 0 {
        s.peak = s.total;
        if ON.load(SeqCst) {
            let s = &mut *s;
            s.snap = s.sizes;
            s.snap_used = s.used;
        }
    }
}
struct A;
thread_local! { static MINE: std::cell::Cell<bool> = const { std::cell::Cell::new(true) }; }
unsafe impl GlobalAlloc for A {
    unsafe fn alloc(&self, l: Layout) -> *mut u8 {
        unsafe {
            let room = l.align().max(16);
            let w = Layout::from_size_align_unchecked(l.size() + room, room);
            let p = System.alloc(w);
            let mine = MINE.get();
            if mine {
                note(l.size(), 1);
            }
            let q = p.add(room);
            q.sub(16).cast::<usize>().write(mine as usize);
            q
        }
    }
    unsafe fn alloc_zeroed(&self, l: Layout) -> *mut u8 {
        unsafe {
            let room = l.align().max(16);
            let w = Layout::from_size_align_unchecked(l.size() + room, room);
            let p = System.alloc_zeroed(w);
            let mine = MINE.get();
            if mine {
                note(l.size(), 1);
            }
            let q = p.add(room);
            q.sub(16).cast::<usize>().write(mine as usize);
            q
        }
    }
    unsafe fn dealloc(&self, p: *mut u8, l: Layout) {
        unsafe {
            let room = l.align().max(16);
            let w = Layout::from_size_align_unchecked(l.size() + room, room);
            if p.sub(16).cast::<usize>().read() == 1 {
                note(l.size(), -1);
            }
            System.dealloc(p.sub(room), w)
        }
    }
}
#[global_allocator]
static HEAP: A = A;

fn begin() {
    ON.store(true, SeqCst);
    let mut s = STATE.lock().unwrap();
    s.peak = 0;
    s.peak = s.total;
    let s = &mut *s;
    s.snap = s.sizes;
    s.snap_used = s.used;
}
fn name(size: usize, dims: &[(&str, usize)]) -> String {
    let n = size as f64 / 4.0;
    for (a, x) in dims {
        for k in [1.0, 2.0, 0.5, 3.0, 6.0] {
            if (n - k * *x as f64).abs() < 0.5 {
                return format!("{k}*{a}");
            }
        }
    }
    for (a, x) in dims {
        for (b, y) in dims {
            for k in [1.0, 2.0, 3.0, 0.5, 0.25] {
                if (n - k * (*x * *y) as f64).abs() < 0.5 {
                    return format!("{k}*{a}*{b}");
                }
            }
        }
    }
    format!("{size}B")
}
fn report(what: &str, base: &BTreeMap<usize, isize>, dims: &[(&str, usize)]) {
    let (peak, snap) = {
        let s = STATE.lock().unwrap();
        (s.peak, s.snap[..s.snap_used].to_vec())
    };
    let mut m: BTreeMap<String, (isize, usize)> = BTreeMap::new();
    for (size, count) in snap {
        let c = count - base.get(&size).copied().unwrap_or(0);
        if c != 0 && size >= 16384 {
            let e = m.entry(name(size, dims)).or_insert((0, size));
            e.0 += c;
        }
    }
    let mut v: Vec<_> = m.into_iter().collect();
    v.sort_by_key(|(_, (c, s))| -(*c * *s as isize));
    println!(
        "{what}: peak {:.2} MiB: {}",
        peak as f64 / 1048576.0,
        v.iter().map(|(n, (c, _))| format!("{c}x {n}")).collect::<Vec<_>>().join(", ")
    );
}
fn now() -> BTreeMap<usize, isize> {
    let s = STATE.lock().unwrap();
    s.sizes[..s.used].iter().copied().filter(|(_, c)| *c != 0).collect()
}

#[derive(Clone, Copy)]
struct Dims {
    v: usize,
    e: usize,
    f: usize,
    layers: usize,
    h: usize,
    g: usize,
    d: usize,
    ranks: usize,
    seq: usize,
    u: usize,
    tn: usize,
    tf: usize,
    tl: usize,
}
fn run(title: &str, parallel: ParallelConfig, x: Dims) {
    let Dims { v, e, f, layers, h, g, d, ranks, seq, u, tn, tf, tl } = x;
    let config = LlamaConfig { head_dim: d, ..LlamaConfig::new(v, e, f, layers, h, g) };
    let device = Device::flex().autodiff();
    let model = Llama::init(&config, &parallel, &device).unwrap();
    let b = Batch::from_rows(&[(0..seq as i64).map(|i| i % v as i64).collect::<Vec<_>>()]).unwrap();
    let l = seq / ranks;
    let title = title.to_owned();
    tests::on_ranks(ranks, move |group: ProcessGroup| {
        let first = group.rank() == 0;
        MINE.set(first);
        let model = model.clone().fork(&device);
        let shard = device.context_parallel(&group).shard(&b).unwrap();
        let dims = [
            ("LE", l * e),
            ("LF", l * f),
            ("LV", l * v),
            ("LHD", l * h * d),
            ("LGD", l * g * d),
            ("LUD", l * u * d),
            ("LH", l * h),
            ("LD", l * d),
            ("tF*F", tf * f),
            ("tN*E", tn * e),
            ("tF*E", tf * e),
            ("tL*V", tl * v),
            ("tL*E", tl * e),
            ("EF", e * f),
            ("EV", e * v),
            ("EHD", e * h * d),
            ("EGD", e * g * d),
            ("EUD", e * u * d),
            ("L", l),
            ("LhD", l * h * d / ranks),
            ("LgD", l * g * d / ranks),
            ("LuD", l * u * d / ranks),
            ("Lu", l * u),
        ];
        if first {
            println!("== {title} L={l} S={seq} E={e} HD={} F={f} V={v} D={d} H={h} G={g} U={u}", h * d);
        }
        for round in 0..2 {
            let base = now();
            group.barrier()?;
            if first {
                begin();
            }
            group.barrier()?;
            let loss = model.loss(&shard, &group).unwrap().mean;
            group.barrier()?;
            if first && round == 1 {
                report("forward", &base, &dims);
                let kept = now();
                let mut s: Vec<String> = Vec::new();
                for (size, c) in &kept {
                    let c = c - base.get(size).copied().unwrap_or(0);
                    if c != 0 && *size >= 16384 {
                        s.push(format!("{c}x {}", name(*size, &dims)));
                    }
                }
                println!("kept: {}", s.join(", "));
            }
            if first {
                begin();
            }
            group.barrier()?;
            let grads = loss.backward();
            group.barrier()?;
            if first && round == 1 {
                report("backward", &base, &dims);
            }
            drop(grads);
            group.barrier()?;
        }
        Ok(())
    });
}

#[test]
fn probe() {
    let base = Dims {
        v: 97,
        e: 320,
        f: 1040,
        layers: 2,
        h: 8,
        g: 2,
        d: 56,
        ranks: 1,
        seq: 2000,
        u: 2,
        tn: 500,
        tf: 250,
        tl: 125,
    };
    let all = |x: Dims, attention, checkpoint| ParallelConfig {
        attention,
        checkpoint,
        mlp_tile: Some(x.tf),
        norm_tile: Some(x.tn),
        loss_tile: Some(x.tl),
    };
    let no = |attention, checkpoint| ParallelConfig { attention, checkpoint, ..ParallelConfig::none() };
    let up = |u| AttentionScheme::UPipe { heads_per_stage: Some(u) };
    let which = std::env::var("PROBE").unwrap_or_default();
    for part in which.split(',') {
        let (dims, word) = part.split_once(':').unwrap();
        let mut x = base;
        let mut scheme = AttentionScheme::Single;
        let (mut cp, mut tiles) = (false, false);
        for w in dims.split('-') {
            match w {
                "fs" => x.f = 48,
                "vl" => {
                    x.v = 2003;
                    x.f = 48
                }
                "p2" => {
                    x.ranks = 2;
                    x.seq = 4000
                }
                "p4" => {
                    x.ranks = 4;
                    x.seq = 8000
                }
                "mha" => x.g = 8,
                "sm" => x.layers = 1,
                "b" => (),
                "tt" => {
                    x.tf = 25;
                    x.tn = 50;
                    x.tl = 25
                }
                "h8" => {
                    x.h = 16;
                    x.g = 4;
                }
                _ => panic!("{w}"),
            }
        }
        for w in word.split('-') {
            match w {
                "s" => scheme = AttentionScheme::Single,
                "y" => scheme = AttentionScheme::Ulysses,
                "c" => cp = true,
                "t" => tiles = true,
                _ => {
                    x.u = w[1..].parse().unwrap();
                    scheme = up(x.u)
                }
            }
        }
        run(part, if tiles { all(x, scheme, cp) } else { no(scheme, cp) }, x);
    }
}
