//! Documents cut into sequences: every token once, in order, S at a time.
//!
//! Nothing is padded and nothing reordered. A document that does not end with its sequence goes on in the next one, as a document of
//! its own there: it sees nothing of what was cut off. What is left at the very end is not used.

use std::ops::Range;
use std::path::PathBuf;

use burn_context_parallel::sequence::{Batch, Document, IGNORE_INDEX};

use crate::documents::Documents;
use crate::error::{Error, Result};
use crate::files::TextError;

/// All sequences of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corpus {
    /// Where the text is from.
    pub files: Vec<PathBuf>,
    /// Its documents.
    pub documents: Documents,
    /// Whether attention, positions and targets stay within a document.
    pub separate: bool,
    /// Tokens of a sequence, S.
    pub seq_len: usize,
    /// Sequences that are left out because they have no target.
    pub idle: usize,
    /// Which ones are used, of all.
    used: Vec<usize>,
    valid: Vec<usize>,
}

impl Corpus {
    /// Cuts; `seq_len` `None` makes one sequence of everything, and only the first `limit` sequences are used.
    ///
    /// # Errors
    ///
    /// [`TextError::Short`] for less than a sequence; [`Error::Input`] if `limit` is more than there are, or no token is a target.
    pub fn new(
        files: Vec<PathBuf>,
        documents: Documents,
        separate: bool,
        seq_len: Option<usize>,
        limit: Option<usize>,
    ) -> Result<Self> {
        let tokens = documents.tokens.len();
        let seq_len = seq_len.unwrap_or(tokens.max(2));
        if tokens < seq_len {
            return Err(TextError::Short { tokens, seq_len }.into());
        }
        let mut corpus = Self { files, documents, separate, seq_len, idle: 0, used: Vec::new(), valid: Vec::new() };
        let all = tokens / seq_len;
        corpus.valid = (0..all).map(|index| corpus.count(index)).collect();
        corpus.used = (0..all).filter(|index| corpus.valid[*index] > 0).collect();
        corpus.idle = all - corpus.used.len();
        let found = corpus.used.len();
        if found == 0 {
            return Err(match corpus.documents.chats {
                0 => Error::input(
                    format!("no target in {tokens} tokens: every document is one token long"),
                    "give longer documents, or --packing stream",
                ),
                chats => Error::input(
                    format!("no answer, hence no target, in the {all} sequences of {chats} conversations"),
                    "give conversations with messages of the role \"assistant\"",
                ),
            });
        }
        if let Some(limit) = limit {
            if limit > found {
                return Err(Error::input(
                    format!("--sequences {limit} of {found} sequences of {seq_len} tokens"),
                    format!("use at most {found}, a smaller --seq-len, or more text"),
                ));
            }
            corpus.used.truncate(limit);
        }
        Ok(corpus)
    }

    /// How many sequences are used.
    pub fn sequences(&self) -> usize {
        self.used.len()
    }

    /// Targets of all sequences that are used.
    pub fn targets(&self) -> usize {
        self.used.iter().map(|index| self.valid[*index]).sum()
    }

    /// Tokens at the end that do not fill a sequence.
    pub fn left_over(&self) -> usize {
        self.documents.tokens.len() % self.seq_len
    }

    /// These sequences side by side.
    ///
    /// # Errors
    ///
    /// None for sequences below [`sequences`](Self::sequences).
    pub fn batch(&self, sequences: &[usize]) -> burn_context_parallel::Result<Batch> {
        let rows = sequences
            .iter()
            .map(|sequence| self.pieces(self.used[*sequence]).map(|piece| self.document(piece)).collect())
            .collect::<burn_context_parallel::Result<Vec<Vec<Document>>>>()?;
        Batch::packed(&rows, self.seq_len)
    }

    /// Where the documents of a sequence lie.
    fn pieces(&self, index: usize) -> impl Iterator<Item = Range<usize>> {
        let (begin, end) = (index * self.seq_len, (index + 1) * self.seq_len);
        let starts = if self.separate { &self.documents.starts[..] } else { &[] };
        let inner = starts.partition_point(|start| *start <= begin)..starts.partition_point(|start| *start < end);
        let begins = std::iter::once(begin).chain(starts[inner.clone()].iter().copied());
        let ends = starts[inner].iter().copied().chain([end]);
        begins.zip(ends).map(|(begin, end)| begin..end)
    }

    fn document(&self, piece: Range<usize>) -> burn_context_parallel::Result<Document> {
        let tokens: Vec<i64> = self.documents.tokens[piece.clone()].iter().map(|id| i64::from(*id)).collect();
        match &self.documents.targets {
            None => Ok(Document::new(tokens)),
            Some(targets) => {
                let labels =
                    tokens.iter().zip(&targets[piece]).map(|(id, counts)| if *counts { *id } else { IGNORE_INDEX });
                let labels = labels.collect();
                Document::with_labels(tokens, labels)
            }
        }
    }

    /// Targets of a sequence: the first token of a document is none.
    fn count(&self, index: usize) -> usize {
        self.pieces(index)
            .map(|piece| match &self.documents.targets {
                None => piece.len() - 1,
                Some(targets) => targets[piece][1..].iter().filter(|counts| **counts).count(),
            })
            .sum()
    }
}
