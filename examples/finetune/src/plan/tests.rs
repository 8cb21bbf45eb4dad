//! Arguments, and what becomes of them.

use rstest::rstest;

use super::*;
use crate::values::Tile;

fn plan(args: &str) -> Result<Plan> {
    Plan::new(&Args::read(["finetune"].into_iter().chain(args.split_whitespace()))?)
}

#[test]
fn without_arguments_everything_is_on() {
    let plan = plan("").unwrap();
    assert_eq!((plan.ranks, plan.seq_len, plan.layout.local_len(0)), (4, 4096, 1024));
    assert_eq!(plan.schedule.as_ref().unwrap().stages().len(), 2);
    assert_eq!(
        plan.parallel,
        ParallelConfig {
            attention: AttentionScheme::UPipe { heads_per_stage: None },
            checkpoint: true,
            blocks_per_checkpoint: 1,
            mlp_tile: Some(256),
            norm_tile: Some(256),
            loss_tile: Some(256),
        }
    );
}

#[test]
fn everything_can_be_off() {
    let plan =
        plan("--attention single --checkpoint off --mlp-tile off --norm-tile off --loss-tile off --clip none").unwrap();
    assert_eq!((plan.ranks, plan.parallel, plan.clip), (1, ParallelConfig::none(), None));
}

#[rstest]
#[case("--seq-len 10 --ranks 4", "3 tokens a rank, 10 / 4 rounded up; 2 padding")]
#[case("--heads-per-stage 3", "3 of 8 query heads a stage (as asked), 3 stages; not a multiple of the ranks")]
#[case(
    "--ranks 9",
    "8 of 8 query heads a stage (one a rank), 1 stages; not a multiple of the ranks: they wait for each other; 1 ranks attend with no head"
)]
#[case("--attention ulysses", "Ulysses: all 8 heads at once, exchanged between ranks")]
#[case("--attention single", "1, attention is single")]
#[case("--steps 2 --seq-len 100", "2 of 100 tokens: batch 1 x accumulate 1 = 1 sequences")]
#[case("--seq-len 4096", "40, the default, of 4096 tokens")]
#[case("--seq-len 100 --sequences 5 --batch 2 --epochs 3", "9, 3 x 3, of 200 tokens")]
#[case("--seq-len 100 --sequences 5 --batch 2", "3 steps an epoch, the last one of 1 sequences")]
#[case("--seq-len 100 --sequences 5", "of 100 tokens, 495 targets")]
#[case("--seq-len 100 --batch 2 --accumulate 3", "600 tokens: batch 2 x accumulate 3 = 6 sequences")]
#[case("--packing documents", "documents (as asked): attention and targets stay within each")]
#[case("", "stream (nothing marks an end, auto)")]
#[case("--data-order shuffle --seed 5", "another one in each epoch, drawn from seed 5")]
#[case("--warmup 4 --schedule cosine", "from 0 in 4 steps, then 0.003 down to 0 by half a cosine over 36 steps")]
#[case("--lr 1e-3", "rate         0.001; as asked")]
#[case("", "rate         0.003; 0.003 is the default from scratch")]
#[case("--ranks 2", "2, as asked; threads of this process, all together on each sequence")]
#[case(
    "--mesh data=2,ulysses=3 --ranks 6",
    "6 = data=2 x ulysses=3, as asked; threads of this process: 2 replicas, 3 ranks together on each sequence"
)]
#[case("--mesh data=2,ulysses=4 --seq-len 64", "16 tokens a rank, 64 / 4 rounded up")]
#[case("--mesh data=3 --attention single", "3 = data=3, as asked; threads of this process: 3 replicas, one rank on")]
#[case(
    "--seq-len 64 --mesh data=2 --batch 2 --accumulate 3",
    "6 sequences of a step are dealt in turn, up to 3 each, in 2 micro-batches"
)]
#[case("--seq-len 64 --mesh data=3 --batch 2", "2 sequences of a step are dealt in turn, up to 1 each, in 1 micro-")]
#[case("--seq-len 64 --mesh data=3 --batch 2", "1 replicas have none: use data=2")]
#[case("--fsdp", "1 / 4 of weights, gradients and optimizer on each rank")]
#[case("", "whole on each rank (no --fsdp)")]
#[case(
    "",
    "checkpoints  at the end and on request; the newest 2 stay; a machine that dies takes all steps with it: see"
)]
#[case("--save-every 7 --keep 3", "checkpoints  every 7 steps, at the end and on request; the newest 3 stay")]
#[case("--seq-len 64 --mesh data=2 --batch 2 --eval", "loss over all sequences, 4 at a time")]
#[case("--seq-len 64 --sequences 3 --batch 2 --eval", "loss over all sequences, 2 at a time")]
#[case("", "checkpoint   on: a block keeps its input only, and runs again")]
#[case("--blocks-per-checkpoint 3", "checkpoint   on: 3 blocks keep the first one's input only, and run again")]
#[case("", "offload      none: block inputs stay on the device (no --offload)")]
#[case("--offload host", "all block inputs wait in host memory, at most what is left when training starts; what")]
#[case(
    "--offload host --offload-host-budget 1GiB --offload-every 2 --offload-in-flight 3",
    "the first of every 2 block inputs waits in host memory, at most 1 GiB over all ranks; what does not fit stays on the \
     device; at most 3 in flight on each rank"
)]
#[case(
    "--offload host --offload-host-budget 0 --offload-dir . --offload-disk-budget 4096",
    "at most 0 bytes over all ranks; what does not fit in a file in ., at most 4 KiB over all ranks; at most 2 in"
)]
#[case(
    "--offload disk --offload-budget 1000",
    "block inputs beyond 1000 bytes on the device, over all ranks, wait in a file in the output folder; at most 2"
)]
#[case(
    "--offload host",
    "peak         heap bytes of this process: the sum over all its ranks; without what offload has"
)]
#[case("--profile new --steps 9", "profile      of steps 2-3, in new")]
#[case("--profile new --steps 1", "profile      of steps 1, in new")]
#[case("--profile new --steps 9 --profile-steps 1,4-6", "profile      of steps 1,4-6, in new")]
#[case("--mlp-tile 100", "mlp tile     100 tokens, 11 a shard")]
fn derived_values_are_shown_with_their_reason(#[case] args: &str, #[case] expected: &str) {
    let text = plan(args).unwrap().to_string();
    assert!(text.contains(expected), "{text}");
}

#[rstest]
#[case(Tile::Auto, 3, Some(1))]
#[case(Tile::Auto, 1024, Some(256))]
#[case(Tile::Auto, 1_000_000, Some(2048))]
#[case(Tile::Off, 1024, None)]
#[case(Tile::Tokens(5000), 1024, Some(5000))]
fn tiles(#[case] asked: Tile, #[case] local: usize, #[case] expected: Option<usize>) {
    assert_eq!(tile(asked, local, Some(2048)), expected);
}
