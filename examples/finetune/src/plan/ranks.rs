//! What the ranks do together: the mesh, the heads of a stage, checkpoints and tiles.

use burn_context_parallel::group::{MAX_RANKS, MeshShape};
use burn_upipe::upipe::Schedule as StageSchedule;
use llama::{LlamaConfig, LlamaError};

use crate::cli::Args;
use crate::error::{Error, Result};
use crate::values::{Scheme, Switch, Tile};

/// The degrees, and how many ranks they make.
pub(super) fn mesh(args: &Args) -> Result<(MeshShape, usize)> {
    let single = args.attention == Scheme::Single;
    let mesh = match (args.mesh, args.ranks) {
        (Some(mesh), _) => mesh,
        (None, None) => MeshShape { ulysses: if single { 1 } else { 4 }, ..MeshShape::default() },
        (None, Some(ranks)) => MeshShape { ulysses: ranks, ..MeshShape::default() },
    };
    let asked =
        args.mesh.map_or_else(|| format!("--ranks {}", mesh.ulysses), |mesh| format!("--mesh {}", mesh.typed()));
    if single && mesh.ulysses > 1 {
        let remedy = match args.mesh {
            None => format!("leave --ranks out, use --mesh data={}, or use ulysses or upipe", mesh.ulysses),
            Some(_) => "use ulysses=1, or --attention ulysses or upipe".to_owned(),
        };
        return Err(Error::input(format!("--attention single with {asked}"), remedy));
    }
    let Some(ranks) = mesh.ranks().filter(|ranks| *ranks <= MAX_RANKS) else {
        return Err(Error::input(asked, format!("use at most {MAX_RANKS} ranks")));
    };
    match args.ranks {
        Some(given) if given != ranks => Err(Error::input(
            format!("{mesh} needs {ranks} ranks, --ranks {given} was given"),
            format!("leave --ranks out, or use --ranks {ranks}"),
        )),
        _ => Ok((mesh, ranks)),
    }
}

pub(super) fn schedule(args: &Args, config: &LlamaConfig, ranks: usize) -> Result<Option<StageSchedule>> {
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    match (args.attention, args.heads_per_stage) {
        (Scheme::Upipe, Some(per_stage)) if per_stage > heads => Err(Error::input(
            format!("--heads-per-stage {per_stage} of {heads} query heads"),
            format!("use 1 to {heads}"),
        )),
        (Scheme::Upipe, per_stage) => {
            let per_stage = per_stage.unwrap_or_else(|| StageSchedule::default_per_stage(heads, ranks));
            StageSchedule::new(heads, kv_heads, ranks, per_stage).map(Some).map_err(core)
        }
        (_, None) => Ok(None),
        (_, Some(_)) => Err(Error::input("--heads-per-stage without --attention upipe", "leave one of them out")),
    }
}

pub(super) fn blocks_per_checkpoint(args: &Args, config: &LlamaConfig) -> Result<usize> {
    let (blocks, layers) = (args.blocks_per_checkpoint, config.num_hidden_layers);
    if blocks > 1 && args.checkpoint == Switch::Off {
        let asked = format!("--blocks-per-checkpoint {blocks} with --checkpoint off");
        return Err(Error::input(asked, "leave one of them out"));
    }
    if blocks > layers {
        return Err(Error::input(
            format!("--blocks-per-checkpoint {blocks} of {layers} blocks"),
            format!("use 1 to {layers}"),
        ));
    }
    Ok(blocks)
}

/// `largest` suits long sequences; a shorter shard is still cut in four, so that the tiles are at work.
pub(super) fn tile(asked: Tile, local: usize, largest: Option<usize>) -> Option<usize> {
    match asked {
        Tile::Off => None,
        Tile::Tokens(tokens) => Some(tokens),
        Tile::Auto => largest.map(|largest| local.div_ceil(4).min(largest)),
    }
}

pub(super) fn core(error: burn_context_parallel::Error) -> Error {
    Error::Model(LlamaError::Core(error))
}
