//! A file without a name in which tensors wait: places in it are used again, it never grows beyond its budget, and it is shortened
//! when asked to be.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::DiskAction;
use super::{Disk, OffloadError};

/// A rank's file.
#[derive(Debug)]
pub(super) struct DiskFile {
    folder: PathBuf,
    budget: u64,
    file: File,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Start -> length, never two that touch.
    free: BTreeMap<u64, u64>,
    /// How far the file goes.
    end: u64,
    used: u64,
    peak: u64,
}

/// A part of the file; it is free again when this is dropped.
#[derive(Debug)]
pub(super) struct DiskPart {
    disk: Arc<DiskFile>,
    at: u64,
    bytes: usize,
}

impl DiskFile {
    /// Makes the file. It has no name: whatever ends the process ends it.
    pub fn new(disk: &Disk) -> Result<Arc<Self>, OffloadError> {
        let file = tempfile::tempfile_in(&disk.folder)
            .map_err(|error| OffloadError::disk(DiskAction::Creating, &disk.folder, 0, 0, &error))?;
        let budget = disk.budget.unwrap_or(u64::MAX);
        Ok(Arc::new(Self { folder: disk.folder.clone(), budget, file, state: Mutex::default() }))
    }

    /// Bytes of tensors: now, and the most.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.lock();
        (state.used, state.peak)
    }

    /// Room for `bytes`; `None` if the budget has no more. The smallest free place that is large enough, or behind the end.
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Option<DiskPart> {
        let len = bytes as u64;
        let mut state = self.lock();
        let fitting = state.free.iter().filter(|(_, free)| **free >= len).min_by_key(|(_, free)| **free);
        let at = match fitting.map(|(at, free)| (*at, *free)) {
            Some((at, free)) => {
                state.free.remove(&at);
                if free > len {
                    state.free.insert(at + len, free - len);
                }
                at
            }
            None => {
                // A free place at the end can be made longer.
                let last = state.free.last_key_value().map(|(at, free)| (*at, *free));
                let at = last.filter(|(at, free)| at + free == state.end).map_or(state.end, |(at, _)| at);
                let end = at.checked_add(len).filter(|end| *end <= self.budget)?;
                state.free.remove(&at);
                state.end = end;
                at
            }
        };
        state.used += len;
        state.peak = state.peak.max(state.used);
        Some(DiskPart { disk: self.clone(), at, bytes })
    }

    /// Gives back what is free behind the last tensor.
    pub fn trim(&self) {
        let mut state = self.lock();
        let last = state.free.last_key_value().map(|(at, free)| (*at, *free));
        let Some((at, _)) = last.filter(|(at, free)| at + free == state.end) else { return };
        match self.file.set_len(at) {
            Ok(()) => {
                state.free.remove(&at);
                state.end = at;
            }
            Err(error) => log::warn!("offload: a file in {} stays as long as it is: {error}", self.folder.display()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DiskPart {
    /// Writes all of it.
    pub fn write(&self, data: &[u8]) -> Result<(), OffloadError> {
        self.checked(DiskAction::Writing, data.len(), || write_at(&self.disk, data, self.at))
    }

    /// Reads all of it.
    pub fn read(&self, data: &mut [u8]) -> Result<(), OffloadError> {
        self.checked(DiskAction::Reading, data.len(), || read_at(&self.disk, data, self.at))
    }

    fn checked(&self, action: DiskAction, len: usize, f: impl FnOnce() -> io::Result<()>) -> Result<(), OffloadError> {
        debug_assert_eq!(len, self.bytes);
        f().map_err(|error| OffloadError::disk(action, &self.disk.folder, self.at, self.bytes, &error))
    }
}

impl Drop for DiskPart {
    fn drop(&mut self) {
        let (mut at, mut len) = (self.at, self.bytes as u64);
        let mut state = self.disk.lock();
        state.used -= len;
        // Joined with free neighbours, so that a larger tensor may follow.
        if let Some(after) = state.free.remove(&(at + len)) {
            len += after;
        }
        let before = state.free.range(..at).next_back().map(|(start, len)| (*start, *len));
        if let Some((start, before)) = before.filter(|(start, before)| start + before == at) {
            (at, len) = (start, len + before);
        }
        state.free.insert(at, len);
    }
}

#[cfg(unix)]
fn write_at(disk: &DiskFile, data: &[u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(&disk.file, data, at)
}

#[cfg(unix)]
fn read_at(disk: &DiskFile, data: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(&disk.file, data, at)
}

// The file has one position: a queue with several threads must not move it between one's seek and its copy.
#[cfg(not(unix))]
fn write_at(disk: &DiskFile, data: &[u8], at: u64) -> io::Result<()> {
    use std::io::{Seek, SeekFrom, Write};
    let (_alone, mut file) = (disk.lock(), &disk.file);
    file.seek(SeekFrom::Start(at))?;
    file.write_all(data)
}

#[cfg(not(unix))]
fn read_at(disk: &DiskFile, data: &mut [u8], at: u64) -> io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};
    let (_alone, mut file) = (disk.lock(), &disk.file);
    file.seek(SeekFrom::Start(at))?;
    file.read_exact(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(budget: Option<u64>) -> Arc<DiskFile> {
        DiskFile::new(&Disk { folder: std::env::temp_dir(), budget }).unwrap()
    }

    #[test]
    fn parts_do_not_overlap_and_are_used_again() {
        let file = file(Some(60));
        let mut parts: Vec<_> = [10, 20, 30].into_iter().map(|bytes| file.reserve(bytes).unwrap()).collect();
        assert!(file.reserve(1).is_none());
        for (i, part) in parts.iter().enumerate() {
            part.write(&vec![i as u8; part.bytes]).unwrap();
        }
        let holds = |part: &DiskPart, value: u8| {
            let mut data = vec![99; part.bytes];
            part.read(&mut data).unwrap();
            assert!(data.iter().all(|byte| *byte == value), "{data:?}");
        };
        (0..3).for_each(|i| holds(&parts[i], i as u8));
        // Two neighbours become room for something larger.
        drop(parts.drain(..2));
        let large = file.reserve(30).unwrap();
        large.write(&[7; 30]).unwrap();
        holds(&parts[0], 2);
        holds(&large, 7);
        assert_eq!(file.counts(), (60, 60));
        // At the end a place grows, within the budget.
        drop(parts);
        assert!(file.reserve(31).is_none() && file.reserve(30).is_some());
        drop(large);
        assert!(file.reserve(60).is_some());
        assert_eq!(file.file.metadata().unwrap().len(), 60);
    }

    #[test]
    fn what_is_free_at_the_end_is_given_back() {
        let file = file(Some(60));
        let parts: Vec<_> = [10, 20, 30].into_iter().map(|bytes| file.reserve(bytes).unwrap()).collect();
        parts.iter().for_each(|part| part.write(&vec![part.bytes as u8; part.bytes]).unwrap());
        let length = || file.file.metadata().unwrap().len();
        file.trim();
        assert_eq!(length(), 60, "all of it is used");
        let [a, b, c] = <[DiskPart; 3]>::try_from(parts).unwrap();
        drop(a);
        file.trim();
        assert_eq!(length(), 60, "not at the end");
        drop(c);
        file.trim();
        assert_eq!(length(), 30);
        let mut data = [0; 20];
        b.read(&mut data).unwrap();
        assert_eq!(data, [20; 20]);
        // It grows again, to the same budget.
        let c = file.reserve(30).unwrap();
        assert!(file.reserve(11).is_none());
        c.write(&[3; 30]).unwrap();
        drop((b, c));
        file.trim();
        assert_eq!((length(), file.counts()), (0, (0, 60)));
    }

    #[test]
    fn what_cannot_be_read_or_made_is_an_error() {
        let file = file(None);
        let part = file.reserve(8).unwrap();
        let error = part.read(&mut [0; 8]).unwrap_err();
        assert!(
            matches!(error, OffloadError::Disk { action: DiskAction::Reading, kind: io::ErrorKind::UnexpectedEof, .. }),
            "{error}"
        );
        let nowhere = Disk { folder: "no/such/folder".into(), budget: None };
        let error = DiskFile::new(&nowhere).unwrap_err().to_string();
        assert!(error.contains("no/such/folder") && error.contains("name a folder"), "{error}");
    }
}
