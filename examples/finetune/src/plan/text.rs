//! What is trained on: text as token ids, cut into sequences.

use llama::LlamaConfig;

use crate::cli::Args;
use crate::corpus::Corpus;
use crate::documents::Documents;
use crate::error::{Error, Result};
use crate::files;
use crate::tokens::{BYTES, Tokens};
use crate::values::{Packing, TokensFrom};

use super::SEQ_LEN;

pub(super) fn tokens(args: &Args, config: &LlamaConfig) -> Result<Tokens> {
    match (args.tokens, &args.model) {
        (TokensFrom::Auto, Some(folder)) => Tokens::from_folder(folder),
        (TokensFrom::Bytes, Some(folder)) if config.vocab_size < BYTES => {
            Err(Error::NotByteLevel { folder: folder.clone(), vocab_size: config.vocab_size })
        }
        _ => Ok(Tokens::Bytes),
    }
}

pub(super) fn corpus(args: &Args, config: &LlamaConfig, tokens: &Tokens) -> Result<(Corpus, Packing)> {
    let files = match &args.data[..] {
        [] => files::own_source()?,
        paths => files::find(paths)?,
    };
    let documents = Documents::read(&files, tokens)?;
    let vocabulary = config.vocab_size;
    if let Some(id) = documents.tokens.iter().find(|id| **id as usize >= vocabulary) {
        return Err(Error::input(
            format!("token id {id} of the text in a vocabulary of {vocabulary}"),
            "put the tokenizer.json that belongs to the model into its folder",
        ));
    }
    let ended = tokens.end().is_some() || documents.records + documents.chats > 0;
    let packing = match args.packing {
        Packing::Auto if ended => Packing::Documents,
        Packing::Auto => Packing::Stream,
        asked => asked,
    };
    let seq_len = args.seq_len.or((!args.eval).then_some(SEQ_LEN));
    let corpus = Corpus::new(files, documents, packing == Packing::Documents, seq_len, args.sequences)?;
    Ok((corpus, packing))
}
