//! One technique after the other, and what each of them buys.

use burn_context_parallel::group::MeshShape;

use super::{Attention, Longest, Machines, Memory, PlanError, Setup, Techniques, longest, memory};

/// One rung: what the one before has, and one technique more.
#[derive(Clone, Debug, PartialEq)]
pub struct Rung {
    /// What came on top.
    pub name: &'static str,
    /// All of it.
    pub setup: Setup,
    /// The longest sequence that fits.
    pub longest: Longest,
    /// What a step over the sequence asked for takes.
    pub memory: Memory,
}

impl Rung {
    /// Bytes of the device at the peak.
    pub fn peak(&self) -> usize {
        self.memory.peak().map_or(0, |phase| phase.total())
    }
}

/// The stack: nothing, FSDP, Ulysses, checkpoints, offload, tiles, U-Pipe; each with what `full` says of it, in the order in which they
/// were found to be needed.
///
/// Until sequences are shared, each device has one of its own. A technique that `full` leaves out is no rung.
///
/// # Errors
///
/// [`PlanError`] if `full` cannot run on these devices.
///
/// ```
/// use burn_upipe::plan::{Machines, Setup, device, ladder, model};
///
/// let machines = Machines { hardware: device("h100-80g")?, count: 8 };
/// let rungs = ladder(&Setup::published(model("llama-3-8b")?, 3 << 20, 8), &machines, None)?;
/// assert_eq!(rungs.len(), 7);
/// // 16 bytes a parameter do not fit on one of them.
/// assert_eq!(rungs[0].longest.seq_len, 0);
/// assert!(rungs[6].longest.seq_len > rungs[2].longest.seq_len);
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn ladder(full: &Setup, machines: &Machines, seconds: Option<f64>) -> Result<Vec<Rung>, PlanError> {
    full.check_on(machines)?;
    let all = full.techniques;
    let shared = |attention| (full.mesh, attention);
    let alone = MeshShape { data: machines.count, ..MeshShape::default() };
    let ulysses = if full.mesh.ulysses > 1 { Attention::Ulysses } else { Attention::Single };
    let nothing = Techniques { optimizer: all.optimizer, prefetch: all.prefetch, ..Techniques::none() };
    let fsdp = Techniques { fsdp: all.fsdp, ..nothing };
    let checkpoint = Techniques { checkpoint: all.checkpoint, ..fsdp };
    let offload = Techniques { offload: all.offload, ..checkpoint };
    let tiles = Techniques { mlp_tile: all.mlp_tile, norm_tile: all.norm_tile, loss_tile: all.loss_tile, ..offload };
    let steps = [
        ("nothing", (alone, Attention::Single), nothing),
        ("+ FSDP", (alone, Attention::Single), fsdp),
        ("+ Ulysses", shared(ulysses), fsdp),
        ("+ checkpoints", shared(ulysses), checkpoint),
        ("+ offload", shared(ulysses), offload),
        ("+ tiles", shared(ulysses), tiles),
        ("+ U-Pipe", shared(all.attention), tiles),
    ];
    let mut rungs: Vec<Rung> = Vec::new();
    for (name, (mesh, attention), techniques) in steps {
        let setup = Setup { mesh, techniques: Techniques { attention, ..techniques }, ..full.clone() };
        if rungs.last().is_some_and(|last| last.setup == setup) {
            continue;
        }
        let (longest, memory) = (longest(&setup, machines, seconds)?, memory(&setup)?);
        rungs.push(Rung { name, setup, longest, memory });
    }
    Ok(rungs)
}
