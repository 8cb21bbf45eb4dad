//! Weights at the end: whether they are numbers, and into a folder.

use std::path::{Path, PathBuf};

use burn::tensor::{DType, TensorData};
use burn_context_parallel::Result as CoreResult;
use burn_context_parallel::fsdp::whole_shapes;
use burn_context_parallel::group::ProcessGroup;
use burn_upipe::learner::training::Holding;
use llama::{FolderWriter, Llama, not_finite};

use crate::error::{Error, Result};
use crate::out;
use crate::plan::{ModelSource, Plan};

/// The first weight that is not finite, the same answer on every rank. Every rank calls it.
pub(crate) fn broken(model: &Llama, holding: &Holding) -> CoreResult<Option<String>> {
    let world = holding.world();
    // What is the same everywhere one rank looks at.
    let looks = world.rank() == 0 || matches!(holding, Holding::Sharded(_));
    agree(looks.then(|| not_finite(model)).flatten(), world)
}

/// What the first rank that found something found.
pub(crate) fn agree(found: Option<String>, world: &ProcessGroup) -> CoreResult<Option<String>> {
    if world.size() == 1 {
        return Ok(found);
    }
    // A byte in front: no part is empty.
    let word = [vec![u8::from(found.is_some())], found.unwrap_or_default().into_bytes()].concat();
    let length = word.len();
    let words = world.all_gather_uneven(TensorData::from_bytes_vec(word, [length], DType::U8))?;
    let found = words.iter().map(TensorData::as_bytes).find(|word| word.first() == Some(&1));
    Ok(found.map(|word| String::from_utf8_lossy(&word[1..]).into_owned()))
}

/// Writes a model's folder with its tokenizer into the output folder; on the first rank with the result. Under FSDP every rank calls it.
///
/// # Memory
///
/// Under FSDP one whole parameter on the first rank.
pub(crate) fn save(model: &Llama, plan: &Plan, out: &Path, holding: &Holding) -> CoreResult<Option<Result<PathBuf>>> {
    let folder = out::weights(out);
    let saved = match holding {
        Holding::Whole(world) => (world.rank() == 0).then(|| model.save(&folder)),
        Holding::Sharded(fsdp) => {
            let first = fsdp.world().rank() == 0;
            let shapes = whole_shapes(model);
            let mut writer = first.then(|| FolderWriter::create(&folder, model.config(), shapes));
            fsdp.each_whole(model, |path, value| {
                // A full disk is this rank's error, not the world's: the others send on.
                if let Some(Err(error)) =
                    writer.as_mut().and_then(|writer| writer.as_mut().ok()).map(|writer| writer.add(path, value))
                {
                    writer = Some(Err(error));
                }
                Ok(())
            })?;
            writer.map(|writer| writer.and_then(FolderWriter::finish))
        }
    };
    Ok(saved.map(|saved| {
        saved.map_err(Error::Save)?;
        let from = match &plan.model {
            ModelSource::Folder(folder) => Some(&**folder),
            ModelSource::Scratch => None,
        };
        plan.tokens.save_beside(from, &folder)?;
        Ok(folder)
    }))
}
