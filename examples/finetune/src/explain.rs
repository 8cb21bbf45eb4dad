//! A plan for people: each value with its reason.

use std::fmt;

use crate::corpus::Corpus;
use crate::deal::rounds;
use crate::memory;
use crate::plan::{LR_MODEL, LR_SCRATCH, ModelSource, OutFolder, Plan, STEPS};
use crate::values::{DataOrder, OnRun, Packing, Precision, Schedule, Scheme, Tile};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, text: String| writeln!(f, "{name:<13}{text}");
        let c = &self.config;
        let local = self.layout.local_len(0);

        line(
            "model",
            match &self.model {
                ModelSource::Scratch => format!("from scratch, drawn once from seed {}", self.seed),
                ModelSource::Folder(folder) => folder.display().to_string(),
            },
        )?;
        line(
            "",
            format!(
                "V {}, E {}, F {}, {} layers, {}/{} heads of {}: {} parameters",
                c.vocab_size,
                c.hidden_size,
                c.intermediate_size,
                c.num_hidden_layers,
                c.num_attention_heads,
                c.num_key_value_heads,
                c.head_dim,
                c.num_params()
            ),
        )?;
        if self.seq_len > c.max_position_embeddings {
            line(
                "",
                format!(
                    "trained on at most {} tokens before: a sequence of {} has positions that are new to it",
                    c.max_position_embeddings, self.seq_len
                ),
            )?;
        }
        line("text", self.text())?;
        line("tokens", self.tokens.describe())?;
        line("packing", self.packing())?;
        line("sequences", self.sequences())?;
        match self.eval {
            true => line("eval", self.evaluation())?,
            false => {
                line("order", self.order())?;
                line("steps", self.steps())?;
            }
        }
        line("device", self.device())?;
        line("ranks", self.ranks())?;
        if self.mesh.data > 1 {
            line("replicas", self.replicas())?;
        }
        line(
            "shards",
            format!(
                "{} tokens a rank, {} / {} rounded up; {} padding",
                local,
                self.seq_len,
                self.mesh.ulysses,
                self.layout.padded_len() - self.seq_len
            ),
        )?;
        line("states", self.states())?;
        line("attention", self.attention())?;
        line(
            "checkpoint",
            match (self.parallel.checkpoint, self.parallel.blocks_per_checkpoint) {
                (true, 1) => "on: a block keeps its input only, and runs again in the backward pass".to_owned(),
                (true, blocks) => {
                    format!(
                        "on: {blocks} blocks keep the first one's input only, and run again together in the backward pass"
                    )
                }
                (false, _) => "off: a block keeps all its intermediates".to_owned(),
            },
        )?;
        line(
            "offload",
            match &self.offload {
                Some(offload) => offload.to_string(),
                None => "none: block inputs stay on the device (no --offload)".to_owned(),
            },
        )?;
        for (name, asked, tile) in [
            ("mlp tile", self.args().mlp_tile, self.parallel.mlp_tile),
            ("norm tile", self.args().norm_tile, self.parallel.norm_tile),
            ("loss tile", self.args().loss_tile, self.parallel.loss_tile),
        ] {
            line(
                name,
                match tile {
                    None => format!("off: {local} tokens at once"),
                    Some(tile) => format!(
                        "{tile} tokens, {} a shard{}",
                        local.div_ceil(tile),
                        if asked == Tile::Auto { "; auto takes a quarter of it, up to a limit" } else { "" }
                    ),
                },
            )?;
        }
        line("compute", self.compute())?;
        if !self.eval {
            line("rate", self.learning_rate())?;
            line("optimizer", format!("AdamW, betas 0.9 and 0.999, eps 1e-8, weight decay {}", self.weight_decay))?;
            line(
                "clip",
                match self.clip {
                    Some(norm) => format!("{norm}, the norm of all gradients together, summed over ranks"),
                    None => "none".to_owned(),
                },
            )?;
        }
        if !self.eval {
            line("memory", memory::line(self))?;
        }
        let away = if self.offload.is_some() { "; without what offload has in host memory" } else { "" };
        match self.device.runtime().is_heap() {
            true => line("peak", format!("heap bytes of this process: the sum over all its ranks{away}"))?,
            false => line(
                "reserved",
                format!(
                    "bytes that the pools of {} hold after a step, for all ranks, in use or kept for reuse (metrics.csv: peak_bytes){away}",
                    self.device
                ),
            )?,
        }
        line(
            "out",
            match &self.out {
                OutFolder::Given(path) => path.display().to_string(),
                OutFolder::NewUnder(parent) => format!("a new folder under {}", parent.display()),
                OutFolder::Nowhere => "nothing is written (no --out)".to_owned(),
            },
        )?;
        match self.on_run {
            OnRun::Refuse => {}
            OnRun::Resume => {
                line("", "goes on from the newest checkpoint there, or starts if there is none".to_owned())?
            }
            OnRun::Overwrite => line("", "a run that is there is replaced".to_owned())?,
        }
        if !self.eval {
            line("checkpoints", self.checkpoints())?;
        }
        if let Some(profile) = &self.profile {
            let (steps, folder) = (&profile.steps, profile.folder.display());
            line("profile", format!("of steps {steps}, in {folder}; if memory is out, what it was full of"))?;
        }
        Ok(())
    }
}

impl Plan {
    fn text(&self) -> String {
        let documents = &self.corpus.documents;
        let mut kinds = Vec::new();
        for (count, kind) in
            [(documents.texts, "text files"), (documents.records, "JSONL texts"), (documents.chats, "conversations")]
        {
            if count > 0 {
                kinds.push(format!("{count} {kind}"));
            }
        }
        if documents.empty > 0 {
            kinds.push(format!("{} empty, left out", documents.empty));
        }
        format!(
            "{} files: {}; {} tokens{}",
            self.corpus.files.len(),
            kinds.join(", "),
            documents.tokens.len(),
            if self.args().data.is_empty() { "; this repository's own source (no --data)" } else { "" }
        )
    }

    fn packing(&self) -> String {
        let why = match self.args().packing {
            Packing::Auto if self.corpus.separate => "there are marked ends, auto",
            Packing::Auto => "nothing marks an end, auto",
            _ => "as asked",
        };
        match self.corpus.separate {
            true => format!("documents ({why}): attention and targets stay within each, positions restart"),
            false => format!("stream ({why}): attention and positions run across documents"),
        }
    }

    fn sequences(&self) -> String {
        let Corpus { seq_len, idle, .. } = &*self.corpus;
        let used = self.corpus.sequences();
        let all = self.corpus.documents.tokens.len() / seq_len;
        let mut text = match all - idle - used {
            0 => format!("{used}"),
            _ => format!("the first {used} of {all}"),
        };
        text += &format!(
            " of {seq_len} tokens{}, {} targets (the first token of a {} is none)",
            if self.args().seq_len.is_none() && self.eval { ", the whole text" } else { "" },
            self.corpus.targets(),
            if self.corpus.separate { "document" } else { "sequence" },
        );
        if *idle > 0 {
            text += &format!("; {idle} more without any target are left out");
        }
        text + &format!("; {} tokens at the end left over", self.corpus.left_over())
    }

    fn order(&self) -> String {
        match self.order.kind {
            DataOrder::File => "that of the files, in every epoch".to_owned(),
            DataOrder::Shuffle => format!("another one in each epoch, drawn from seed {}", self.seed),
        }
    }

    fn steps(&self) -> String {
        let (per_step, per_epoch) = (self.order.per_step, self.order.steps_per_epoch());
        let why = match (self.args().steps, self.args().epochs) {
            (None, None) => format!("{STEPS}, the default,"),
            (_, Some(epochs)) => format!("{}, {epochs} x {per_epoch},", self.steps),
            _ => self.steps.to_string(),
        };
        let last = match self.order.sequences % per_step {
            0 => String::new(),
            left => format!(", the last one of {left} sequences"),
        };
        format!(
            "{why} of {} tokens: batch {} x accumulate {} = {per_step} sequences; {per_epoch} steps an epoch{last}; {:.2} epochs",
            per_step * self.seq_len,
            self.batch,
            self.accumulate,
            self.steps as f64 / per_epoch as f64
        )
    }

    fn evaluation(&self) -> String {
        let at_once = self.batch.saturating_mul(self.mesh.data).min(self.corpus.sequences());
        format!("no training: loss over all sequences, {at_once} at a time")
    }

    fn device(&self) -> String {
        let (device, why) =
            (&self.device, if self.device.runtime().is_heap() { ", Burn's own backend for processors" } else { "" });
        match (device.count(), self.ranks) {
            (1, 1) => format!("{device}{why}"),
            (1, _) => format!("{device}{why}: all ranks share it"),
            _ => format!("{device}: dealt out to ranks in turn"),
        }
    }

    /// How ranks and sequences relate: what people ask first.
    fn ranks(&self) -> String {
        let args = self.args();
        let together = "all together on each sequence: more ranks, shorter shards, the same batch";
        match (self.mesh.data, args.attention, args.ranks.is_some() || args.mesh.is_some()) {
            (1, Scheme::Single, _) => "1, attention is single".to_owned(),
            (1, _, false) => format!("{}, the default; threads of this process, {together}", self.ranks),
            (1, _, true) => format!("{}, as asked; threads of this process, {together}", self.ranks),
            (data, _, _) => format!(
                "{} = {}, as asked; threads of this process: {data} replicas, {} on each sequence",
                self.ranks,
                self.mesh,
                match self.mesh.ulysses {
                    1 => "one rank".to_owned(),
                    ranks => format!("{ranks} ranks together"),
                },
            ),
        }
    }

    fn replicas(&self) -> String {
        let data = self.mesh.data;
        let per_step = match self.eval {
            true => self.batch.saturating_mul(data).min(self.corpus.sequences()),
            false => self.order.per_step,
        };
        let rounds = rounds(per_step, data, self.batch);
        let idle = match data.saturating_sub(per_step) {
            0 => String::new(),
            idle => format!("; {idle} replicas have none: use data={per_step} to keep all busy"),
        };
        format!(
            "{per_step} sequences {} are dealt in turn, up to {} each, in {rounds} micro-batches (where sequences are missing: padding, \
             which adds 0); one mean over the targets of all{idle}",
            if self.eval { "at a time" } else { "of a step" },
            per_step.div_ceil(data),
        )
    }

    fn states(&self) -> String {
        match self.fsdp {
            true => format!(
                "1 / {} of weights, gradients and optimizer on each rank; a block's weights are gathered while it computes",
                self.ranks
            ),
            false => "weights, gradients and optimizer whole on each rank (no --fsdp)".to_owned(),
        }
    }

    fn checkpoints(&self) -> String {
        let (every, lost) = match self.save_every {
            Some(steps) => (format!("every {steps} steps, "), String::new()),
            None => (String::new(), "; a machine that dies takes all steps with it: see --save-every".to_owned()),
        };
        format!(
            "{every}at the end and on request; the newest {} stay{lost}. To ask: a file save-now in the folder; SIGINT or SIGTERM, \
             which end the run after the step at hand",
            self.keep
        )
    }

    fn compute(&self) -> String {
        match self.precision {
            Precision::F32 => "f32".to_owned(),
            Precision::Bf16 => "bf16; weights, gradients and optimizer in f32".to_owned(),
        }
    }

    fn learning_rate(&self) -> String {
        let rate = &self.rate;
        let warmup = match rate.warmup {
            0 => String::new(),
            warmup => format!("from 0 in {warmup} steps, then "),
        };
        let course = match rate.kind {
            Schedule::Constant => format!("{warmup}{}", rate.peak),
            Schedule::Cosine => {
                format!(
                    "{warmup}{} down to {} by half a cosine over {} steps",
                    rate.peak,
                    rate.min,
                    rate.steps - rate.warmup
                )
            }
        };
        let why = match (self.args().lr, &self.model) {
            (Some(_), _) => "as asked".to_owned(),
            (None, ModelSource::Scratch) => format!("{LR_SCRATCH} is the default from scratch"),
            (None, ModelSource::Folder(_)) => {
                format!("{LR_MODEL} is the default with --model: larger steps undo what it has learnt")
            }
        };
        format!("{course}; {why}")
    }

    fn attention(&self) -> String {
        let heads = self.config.num_attention_heads;
        let idle = match self.mesh.ulysses.saturating_sub(heads) {
            0 => String::new(),
            idle => format!("; {idle} ranks attend with no head: use at most {heads} ranks to keep all busy"),
        };
        match &self.schedule {
            None if self.mesh.ulysses == 1 => {
                format!("{:?}: all {heads} heads at once, no exchange", self.args().attention)
            }
            None => format!("{:?}: all {heads} heads at once, exchanged between ranks{idle}", self.args().attention),
            Some(schedule) => {
                let per_stage = schedule.per_stage();
                let why = match self.args().heads_per_stage {
                    Some(_) => "as asked",
                    None => "one a rank",
                };
                let uneven = match per_stage % self.mesh.ulysses {
                    0 => "",
                    _ => "; not a multiple of the ranks: they wait for each other",
                };
                format!(
                    "Upipe: {per_stage} of {heads} query heads a stage ({why}), {} stages{uneven}{idle}",
                    schedule.stages().len()
                )
            }
        }
    }
}
