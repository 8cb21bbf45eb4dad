//! What ranks tell each other while they save and load: all of them succeed, or all of them fail.

use burn::tensor::{DType, TensorData};
use burn_context_parallel::group::ProcessGroup;

use super::{CheckpointError, Result};

fn pack(bytes: Vec<u8>) -> TensorData {
    let length = bytes.len();
    TensorData::from_bytes_vec(bytes, [length], DType::U8)
}

/// Every rank's outcome is this rank's: it goes on if all did well. A rank that failed keeps its own error, the others get
/// that of the first one that did.
///
/// # Communication
///
/// A byte to every rank, or an error's text.
pub(super) fn together<T>(group: &ProcessGroup, outcome: Result<T>) -> Result<T> {
    if let Err(CheckpointError::Group(_)) = outcome {
        // The world has failed: everyone gets that from the call it is in.
        return outcome;
    }
    let first = first_problem(group, outcome.as_ref().err().map(ToString::to_string))?;
    match (outcome, first) {
        (Ok(_), Some((rank, problem))) => Err(CheckpointError::Rank { rank, problem }),
        (outcome, _) => outcome,
    }
}

/// The first rank that has a problem, and what it is.
///
/// # Communication
///
/// A byte to every rank, and the text.
pub(super) fn first_problem(group: &ProcessGroup, problem: Option<String>) -> Result<Option<(usize, String)>> {
    // The first byte says whether the rest is meant: no part is empty.
    let mut word = vec![u8::from(problem.is_some())];
    word.extend(problem.unwrap_or_default().into_bytes());
    let words = group.all_gather_uneven(pack(word))?;
    let found = words.iter().map(TensorData::as_bytes).enumerate().find(|(_, word)| word[0] != 0);
    Ok(found.map(|(rank, word)| (rank, String::from_utf8_lossy(&word[1..]).into_owned())))
}

/// What the first rank says.
///
/// # Communication
///
/// The text to every rank.
pub(super) fn first_says(group: &ProcessGroup, text: Option<String>) -> Result<String> {
    // A byte in front: no value is empty.
    let value = text.map(|text| pack([b":", text.as_bytes()].concat()));
    let said = group.broadcast(value, 0)?;
    Ok(String::from_utf8_lossy(&said.as_bytes()[1..]).into_owned())
}

/// Every rank's bytes on the first one; nothing elsewhere. No part may be empty.
///
/// # Communication
///
/// Eight bytes to every rank, and the bytes to the first.
pub(super) fn to_first(group: &ProcessGroup, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    let lengths = group.all_gather(TensorData::from([bytes.len() as i64]))?;
    let expected = |length: &TensorData| length.iter::<i64>().next().map(|length| vec![length as usize]);
    let expected: Vec<_> = match group.rank() {
        0 => lengths.iter().map(expected).collect(),
        _ => vec![None; group.size()],
    };
    let mut parts = vec![None; group.size()];
    parts[0] = Some(pack(bytes));
    let parts = group.all_to_all_uneven(parts, &expected)?;
    Ok(parts.into_iter().flatten().map(|part| part.as_bytes().to_vec()).collect())
}
