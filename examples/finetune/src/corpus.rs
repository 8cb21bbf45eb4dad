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
            return Err(TextError::Short { files, tokens, seq_len }.into());
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

    /// What tells this text from another: of token ids, their documents and targets. The same on every machine.
    pub fn checksum(&self) -> u64 {
        // FNV-1a over words of 64 bits: against slips, not against forgers.
        let mut sum = 0xcbf2_9ce4_8422_2325_u64;
        let mut add = |word: u64| sum = (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        let Documents { tokens, starts, targets, .. } = &self.documents;
        tokens.iter().for_each(|id| add(u64::from(*id)));
        starts.iter().for_each(|start| add(*start as u64));
        targets.iter().flatten().for_each(|counts| add(u64::from(*counts)));
        sum
    }

    /// Targets of these sequences.
    ///
    /// # Panics
    ///
    /// For sequences that are not below [`sequences`](Self::sequences).
    pub fn targets_of(&self, sequences: &[usize]) -> usize {
        sequences.iter().map(|sequence| self.valid[self.used[*sequence]]).sum()
    }

    /// These sequences side by side; none at all make a row of padding, which has no target.
    ///
    /// # Errors
    ///
    /// None for sequences below [`sequences`](Self::sequences).
    pub fn batch(&self, sequences: &[usize]) -> burn_context_parallel::Result<Batch> {
        let mut rows = sequences
            .iter()
            .map(|sequence| self.pieces(self.used[*sequence]).map(|piece| self.document(piece)).collect())
            .collect::<burn_context_parallel::Result<Vec<Vec<Document>>>>()?;
        if rows.is_empty() {
            rows.push(Vec::new());
        }
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

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Int, Tensor};
    use burn_context_parallel::sequence::SequenceLayout;
    use rstest::rstest;

    use super::*;

    fn documents(lengths: &[usize], targets: Option<&[usize]>) -> Documents {
        let mut documents = Documents::default();
        let mut next = 0;
        for length in lengths {
            let ids = next..next + *length as u32;
            let chosen = targets.map(|targets| ids.clone().map(|id| targets.contains(&(id as usize))).collect());
            assert!(documents.push(ids.collect(), chosen));
            next += *length as u32;
        }
        documents
    }

    fn corpus(lengths: &[usize], separate: bool, seq_len: usize) -> Corpus {
        Corpus::new(Vec::new(), documents(lengths, None), separate, Some(seq_len), None).unwrap()
    }

    /// Tokens, positions and targets of a sequence.
    fn sequence(corpus: &Corpus, index: usize) -> [Vec<i64>; 3] {
        let layout = SequenceLayout::contiguous(corpus.seq_len, 1).unwrap();
        let shard = corpus.batch(&[index]).unwrap().shard(&layout, 0, &Device::flex()).unwrap();
        let numbers = |x: Tensor<2, Int>| x.into_data().iter::<i64>().collect();
        [numbers(shard.tokens), numbers(shard.positions), numbers(shard.targets)]
    }

    #[rstest]
    #[case(&[10], false)]
    #[case(&[10], true)]
    #[case(&[3, 1, 4, 2, 7], true)]
    #[case(&[3, 1, 4, 2, 7], false)]
    #[case(&[2, 2, 2, 2, 2], true)]
    fn every_token_comes_once_and_in_order(#[case] lengths: &[usize], #[case] separate: bool) {
        let total: usize = lengths.iter().sum();
        for seq_len in 2..=total {
            let corpus = corpus(lengths, separate, seq_len);
            let tokens: Vec<i64> =
                (0..corpus.sequences()).flat_map(|index| sequence(&corpus, index)[0].clone()).collect();
            let idle = |token: &i64| corpus.valid[*token as usize / seq_len] == 0;
            let expected = (0..(total - corpus.left_over()) as i64).filter(|token| !idle(token));
            assert_eq!(tokens, expected.collect::<Vec<_>>());
            assert!(corpus.idle == 0 || seq_len == 2, "only two documents of a token each");
            let valid: usize = (0..corpus.sequences()).map(|index| corpus.batch(&[index]).unwrap().valid()).sum();
            assert_eq!(valid, corpus.targets(), "what is counted is what there is");
            let last = [corpus.sequences() - 1];
            assert_eq!(corpus.targets_of(&last), corpus.batch(&last).unwrap().valid());
            let padding = corpus.batch(&[]).unwrap();
            assert_eq!((padding.rows(), padding.len(), padding.valid()), (1, seq_len, 0));
        }
    }

    #[test]
    fn documents_begin_anew_and_go_on_as_others_in_the_next_sequence() {
        let corpus = corpus(&[3, 6, 1], true, 5);
        assert_eq!(sequence(&corpus, 0), [vec![0, 1, 2, 3, 4], vec![0, 1, 2, 0, 1], vec![1, 2, -100, 4, -100]],);
        assert_eq!(sequence(&corpus, 1), [vec![5, 6, 7, 8, 9], vec![0, 1, 2, 3, 0], vec![6, 7, 8, -100, -100]],);
    }

    #[rstest]
    #[case(&[10], true)]
    #[case(&[3, 7], false)]
    fn one_text_and_a_stream_are_whole_sequences(#[case] lengths: &[usize], #[case] separate: bool) {
        let corpus = corpus(lengths, separate, 5);
        assert_eq!(sequence(&corpus, 1), [vec![5, 6, 7, 8, 9], vec![0, 1, 2, 3, 4], vec![6, 7, 8, 9, -100]],);
    }

    #[test]
    fn sequences_without_targets_are_left_out_and_the_others_have_only_chosen_ones() {
        let chosen = documents(&[4, 8], Some(&[2, 10, 11]));
        let corpus = Corpus::new(Vec::new(), chosen, true, Some(4), None).unwrap();
        assert_eq!((corpus.sequences(), corpus.idle, corpus.targets()), (2, 1, 3));
        assert_eq!(sequence(&corpus, 0)[2], [-100, 2, -100, -100]);
        assert_eq!(sequence(&corpus, 1)[2], [-100, 10, 11, -100]);
    }

    #[test]
    fn a_checksum_tells_tokens_documents_and_targets_apart() {
        let of = |documents: Documents| Corpus::new(Vec::new(), documents, true, Some(4), None).unwrap().checksum();
        let all = [
            documents(&[8], None),
            documents(&[9], None),
            documents(&[4, 4], None),
            documents(&[4, 4], Some(&[1, 2])),
            documents(&[4, 4], Some(&[1, 3])),
        ];
        let sums: std::collections::BTreeSet<u64> = all.into_iter().map(of).collect();
        assert_eq!(sums.len(), 5);
        assert_eq!(of(documents(&[4, 4], None)), of(documents(&[4, 4], None)));
    }

    #[test]
    fn only_the_first_sequences_are_used_and_the_whole_is_one() {
        let limited = Corpus::new(Vec::new(), documents(&[20], None), true, Some(4), Some(2)).unwrap();
        assert_eq!((limited.sequences(), limited.targets()), (2, 6));
        let whole = Corpus::new(Vec::new(), documents(&[20], None), true, None, None).unwrap();
        assert_eq!((whole.sequences(), whole.seq_len, whole.targets()), (1, 20, 19));
    }

    #[rstest]
    #[case(&[4], None, Some(5), None, "4 tokens of text are less than a sequence of 5: give more with --data, or --seq-len 4 or less")]
    #[case(&[1], None, None, None, "1 tokens of text are less than a sequence of 2: give more with --data")]
    #[case(&[9], None, Some(3), Some(4), "--sequences 4 of 3 sequences of 3 tokens: use at most 3")]
    #[case(&[1, 1], None, Some(2), None, "no target in 2 tokens")]
    fn what_cannot_be_cut_is_an_error_with_the_numbers(
        #[case] lengths: &[usize],
        #[case] targets: Option<&[usize]>,
        #[case] seq_len: Option<usize>,
        #[case] limit: Option<usize>,
        #[case] expected: &str,
    ) {
        let error = Corpus::new(Vec::new(), documents(lengths, targets), true, seq_len, limit).unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
}
