//! What a run of days needs beside its mathematics: to be saved, to be ended politely, and to go on where it was.
//!
//! | | |
//! |---|---|
//! | [`checkpoint`] | step-level checkpoints on disk: written by all ranks, whole or not there, loaded on another mesh |
//! | [`training`] | a model and its optimizer as a checkpoint's pieces, and back |
//! | [`stop`] | whether the run shall save or end, agreed by all ranks |

pub mod checkpoint;
pub mod stop;
pub mod training;
