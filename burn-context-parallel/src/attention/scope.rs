//! The sequence at hand: the one ambient value, and how it is entered again by whoever recomputes.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device};

use crate::flash::FlashOptions;
use crate::group::ProcessGroup;
use crate::sequence::{Documents, MAX_TOKENS, RotaryFrequencies, RotaryTable, SequenceLayout, Shard};
use crate::{Error, Result};

/// Who shares the sequence, how it lies on them, which positions this rank holds, and which documents the sequence has.
///
/// A clone is a handle to the same context.
#[derive(Clone, Debug)]
pub struct SequenceContext {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    group: ProcessGroup,
    layout: Arc<SequenceLayout>,
    positions: Arc<Vec<i64>>,
    documents: Option<Documents>,
    rows: usize,
    // Every layer asks for the same table; it lives as long as the batch.
    tables: Mutex<Vec<TableEntry>>,
}

#[derive(Debug)]
struct TableEntry {
    frequencies: RotaryFrequencies,
    dtype: DType,
    device: Device,
    table: RotaryTable,
}

impl SequenceContext {
    /// The context of one shard of a group's sequence.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the shard was cut for another rank or number of ranks.
    pub fn new(group: &ProcessGroup, shard: &Shard) -> Result<Self> {
        let layout = shard.layout();
        if layout.ranks() != group.size() || shard.rank() != group.rank() {
            return Err(Error::invalid(
                "SequenceContext::new",
                format!(
                    "the shard of rank {} of {} on rank {} of a group of {}",
                    shard.rank(),
                    layout.ranks(),
                    group.rank(),
                    group.size()
                ),
                "cut the batch with ContextParallel::shard of the same group",
            ));
        }
        let rows = shard.tokens.dims()[0];
        let documents = shard.documents().cloned();
        Ok(Self::build(group.clone(), layout.clone(), shard.positions_host().clone(), documents, rows))
    }

    /// The context of a layout whose positions are the global indices, for `rows` sequences side by side.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the layout is for another number of ranks, `rows` is zero, or there are more than [`MAX_TOKENS`] tokens.
    pub fn from_layout(group: &ProcessGroup, layout: SequenceLayout, rows: usize) -> Result<Self> {
        if layout.ranks() != group.size() || rows == 0 {
            return Err(Error::invalid(
                "SequenceContext::from_layout",
                format!("a layout for {} ranks and {rows} rows in a group of {}", layout.ranks(), group.size()),
                "make the layout for the group's size, with at least one row",
            ));
        }
        if layout.len().checked_mul(rows).is_none_or(|tokens| tokens > MAX_TOKENS) {
            return Err(Error::invalid(
                "SequenceContext::from_layout",
                format!("{rows} rows of {} tokens", layout.len()),
                format!("use at most {MAX_TOKENS} tokens in all"),
            ));
        }
        let row: Vec<i64> = layout.indices(group.rank()).map(|index| index as i64).collect();
        Ok(Self::build(group.clone(), Arc::new(layout), Arc::new(row.repeat(rows)), None, rows))
    }

    /// One device that holds the whole sequence of `len` tokens, positions from 0.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `len` or `rows` is zero.
    pub fn single(len: usize, rows: usize) -> Result<Self> {
        Self::from_layout(&ProcessGroup::single(), SequenceLayout::contiguous(len, 1)?, rows)
    }

    fn build(
        group: ProcessGroup,
        layout: Arc<SequenceLayout>,
        positions: Arc<Vec<i64>>,
        documents: Option<Documents>,
        rows: usize,
    ) -> Self {
        Self { inner: Arc::new(Inner { group, layout, positions, documents, rows, tables: Mutex::default() }) }
    }

    /// The ranks that share the sequence.
    pub fn group(&self) -> &ProcessGroup {
        &self.inner.group
    }

    /// How the sequence lies on them.
    pub fn layout(&self) -> &SequenceLayout {
        &self.inner.layout
    }

    /// Sequences side by side, B.
    pub fn rows(&self) -> usize {
        self.inner.rows
    }

    /// Tokens that this rank holds, L, padding included.
    pub fn local_len(&self) -> usize {
        self.inner.layout.local_len(self.inner.group.rank())
    }

    /// This rank's positions, row by row.
    pub fn positions(&self) -> &[i64] {
        &self.inner.positions
    }

    /// The documents of the whole sequence, if attention is bounded by any.
    pub fn documents(&self) -> Option<&Documents> {
        self.inner.documents.as_ref()
    }

    /// The options of attention within this sequence: those given, bounded by the sequence's documents.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the options bring documents of their own: which of the two hold would be a guess.
    pub fn bound(&self, options: &FlashOptions) -> Result<FlashOptions> {
        let documents = self.documents_or("SequenceContext::bound", options.documents.clone())?;
        Ok(FlashOptions { documents, ..options.clone() })
    }

    /// The sequence's documents, of queries and keys, or those that were given with the call where it has none.
    pub(crate) fn documents_or(
        &self,
        operation: &'static str,
        given: Option<(Documents, Documents)>,
    ) -> Result<Option<(Documents, Documents)>> {
        match (given, self.documents()) {
            (given, None) => Ok(given),
            (None, Some(documents)) => Ok(Some((documents.clone(), documents.clone()))),
            (Some(_), Some(_)) => Err(Error::invalid(
                operation,
                "documents with the call in a sequence that has documents",
                "give documents with the batch (Batch::with_documents), not with the call",
            )),
        }
    }

    /// Checks that a tensor's batch and sequence dims are this context's.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with both shapes.
    pub fn expect(&self, operation: &'static str, batch: usize, len: usize) -> Result<()> {
        if batch == self.rows() && len == self.local_len() {
            return Ok(());
        }
        Err(Error::invalid(
            operation,
            format!(
                "a tensor of batch {batch} and {len} tokens where rank {} of {} holds batch {} and {} tokens",
                self.group().rank(),
                self.group().size(),
                self.rows(),
                self.local_len()
            ),
            "pass the shard's own activations: neither the whole sequence nor a slice of the shard",
        ))
    }

    /// The rotary table of this rank's positions; computed once per context and kind.
    ///
    /// # Memory
    ///
    /// `B L D * size` bytes, held while the context lives.
    pub fn rotary(&self, frequencies: &RotaryFrequencies, dtype: DType, device: &Device) -> RotaryTable {
        let device = device.clone().inner();
        let mut tables = self.inner.tables.lock().unwrap_or_else(|poison| poison.into_inner());
        let known = tables
            .iter()
            .find(|entry| entry.frequencies == *frequencies && entry.dtype == dtype && entry.device == device);
        if let Some(entry) = known {
            return entry.table.clone();
        }
        let table = frequencies.table(&self.inner.positions, self.inner.rows, dtype, &device);
        tables.push(TableEntry { frequencies: frequencies.clone(), dtype, device, table: table.clone() });
        table
    }
}

thread_local! {
    static CURRENT: RefCell<Option<SequenceContext>> = const { RefCell::new(None) };
}

/// The context of the scope that this thread is in.
pub fn current() -> Option<SequenceContext> {
    CURRENT.with_borrow(Clone::clone)
}

/// Runs `f` inside `context` (or, with `None`, outside any), and restores what was before, also on unwinding.
///
/// Whoever recomputes in a backward pass captures [`current`] in forward and enters it again with this: the
/// backward pass may run after the scope has ended.
pub fn scope<R>(context: Option<SequenceContext>, f: impl FnOnce() -> R) -> R {
    struct Restore(Option<SequenceContext>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }
    let _restore = Restore(CURRENT.replace(context));
    f()
}
