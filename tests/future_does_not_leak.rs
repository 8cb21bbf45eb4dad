//! Changing the last token changes no bit of any earlier output, under every scheme; and no later token's gradient reaches
//! an earlier output.

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::attention::SequenceContext;
use burn_context_parallel::sequence::{RotaryFrequencies, SequenceLayout};
use burn_upipe::upipe::{AttentionScheme, UPipeAttentionConfig};
use rstest::rstest;
use tests::{assert_same_bits, filled, on_ranks, tensor, values};

const SEQ: usize = 21;

/// The whole output [1, S, E] with the last token as given.
fn output(scheme: AttentionScheme, ranks: usize, last: f64) -> Tensor<3> {
    let layout = SequenceLayout::contiguous(SEQ, ranks).unwrap();
    let of_ranks = layout.clone();
    let parts = on_ranks(ranks, move |world| {
        let device = Device::flex();
        device.seed(7); // weights: only equal between the two runs, made by one rank for all
        let x = tensor::<3>(&values(3, &[1, SEQ, 8]), DType::F32, &device);
        let x = x.slice_assign([0..1, SEQ - 1..SEQ, 0..8], Tensor::full([1, 1, 8], last, &device));
        let module = UPipeAttentionConfig::new(8, 6, 3, 4).init(&device)?.with_scheme(scheme)?;
        let module = module.with_rotary(RotaryFrequencies::new(4, 1e4)?)?;
        let module = filled(module, 20, DType::F32, 1.0);
        let context = SequenceContext::from_layout(&world, of_ranks.clone(), 1)?;
        Ok(module.forward_in(of_ranks.cut(&x, 1, world.rank()), &context)?.to_data())
    });
    let parts: Vec<Tensor<3>> = parts.iter().map(|part| tensor(part, DType::F32, &Device::flex())).collect();
    layout.assemble(&parts, 1)
}

/// Untied-Ulysses `context_parallel_2d.py`: tokens exchanged out of order see their future.
#[rstest]
fn earlier_outputs_keep_their_bits(
    #[values(
        AttentionScheme::Single,
        AttentionScheme::Ulysses,
        AttentionScheme::UPipe { heads_per_stage: None },
        AttentionScheme::UPipe { heads_per_stage: Some(1) },
        AttentionScheme::UPipe { heads_per_stage: Some(5) }
    )]
    scheme: AttentionScheme,
    #[values(1, 2, 3, 4)] ranks: usize,
) {
    if scheme == AttentionScheme::Single && ranks > 1 {
        return; // refused, see below
    }
    let (before, after) = (output(scheme, ranks, 0.5), output(scheme, ranks, -3.0));
    let early = |x: &Tensor<3>| x.clone().narrow(1, 0, SEQ - 1);
    assert_same_bits(format!("{scheme:?} on {ranks}"), &early(&after), &early(&before));
    let last = |x: &Tensor<3>| x.clone().narrow(1, SEQ - 1, 1).to_data();
    assert_ne!(last(&before), last(&after), "the last token sees itself");
}

#[test]
fn one_device_attention_refuses_part_of_a_sequence() {
    on_ranks(2, |world| {
        let device = Device::flex();
        let module = UPipeAttentionConfig::new(8, 2, 2, 4).init(&device)?.with_scheme(AttentionScheme::Single)?;
        let context = SequenceContext::from_layout(&world, SequenceLayout::contiguous(6, 2)?, 1)?;
        let error = module.forward_in(Tensor::zeros([1, 3, 8], &device), &context).unwrap_err();
        assert!(error.to_string().contains("group of 2 ranks"), "{error}");
        let error = module.forward_in(Tensor::zeros([1, 6, 8], &device), &context).unwrap_err();
        assert!(error.to_string().contains("6 tokens where rank"), "{error}");
        Ok(())
    });
}
