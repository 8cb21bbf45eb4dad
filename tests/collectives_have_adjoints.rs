//! Every differentiable collective has the adjoint that it claims: <A x, y> = <x, A* y>, summed over ranks.

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::collective::{all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter, shift};
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::{Error, Result};
use rstest::rstest;
use tests::{on_ranks, tensor, values};

/// Unequal parts of 30; a rank may get nothing.
fn sizes(ranks: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = (0..ranks).map(|rank| [3, 1, 0, 4, 2][rank % 5]).collect();
    let sum: usize = sizes.iter().sum();
    sizes[0] += 30 - sum;
    sizes
}

fn apply(name: &str, x: Tensor<2>, group: &ProcessGroup) -> Result<Tensor<2>> {
    let same = || x.clone().narrow(0, 0, 2); // equally long on all ranks
    let last = group.size() - 1;
    match name {
        "all_to_all" => all_to_all(x, 1, 0, &sizes(group.size()), group),
        "all_gather dim 0" => all_gather(x, 0, group),
        "all_gather dim 1" => all_gather(same(), 1, group),
        "reduce_scatter" => reduce_scatter(same(), 1, &sizes(group.size()), group),
        "all_reduce" => all_reduce(same(), group),
        "broadcast" => broadcast(same(), last, group),
        "reduce" => reduce(same(), last, group),
        "shift" => shift(same(), 1, group),
        "shift back" => shift(same(), -2, group),
        other => panic!("no operation {other}"),
    }
}

#[rstest]
fn inner_products_agree(
    #[values(
        "all_to_all",
        "all_gather dim 0",
        "all_gather dim 1",
        "reduce_scatter",
        "all_reduce",
        "broadcast",
        "reduce",
        "shift",
        "shift back"
    )]
    name: &'static str,
    #[values(1, 2, 3, 4, 5)] ranks: usize,
) {
    let products = on_ranks(ranks, move |world| {
        let device = Device::flex().autodiff();
        let rows = 2 + world.rank(); // parts of unequal length
        let x = tensor::<2>(&values(world.rank() as u64 + 1, &[rows, 30]), DType::F64, &device).require_grad();
        let ax = apply(name, x.clone(), &world)?;
        let y = tensor::<2>(&values(world.rank() as u64 + 50, &ax.dims()), DType::F64, &device);
        let product = (ax * y).sum();
        let grads = product.backward();
        let dx = x.grad(&grads).expect("every input has a gradient");
        Ok([product.into_scalar::<f64>(), (x.inner() * dx).sum().into_scalar::<f64>()])
    });
    let [left, right] = products.iter().fold([0.0, 0.0], |sum, p| [sum[0] + p[0], sum[1] + p[1]]);
    assert!((left - right).abs() < 1e-12 * left.abs().max(1.0), "{name} on {ranks}: {left} and {right}");
    assert!(left != 0.0, "{name}: an empty test");
}

/// DeepSpeed PR#7809, #7672: the slice of the backward pass taken by world rank.
#[test]
fn a_group_that_does_not_start_at_rank_0_uses_its_own_numbers() {
    let sums = on_ranks(4, |world| {
        let pair = if world.rank() < 2 { [0, 1] } else { [2, 3] };
        let group = world.subgroup(&pair)?;
        let device = Device::flex().autodiff();
        let x = Tensor::<1>::from_floats([1.0 + world.rank() as f32], &device).require_grad();
        let whole = all_gather(x.clone(), 0, &group)?;
        let weights = Tensor::<1>::from_floats([10.0, 100.0], &device);
        let grads = (whole * weights).sum().backward();
        Ok(x.grad(&grads).unwrap().into_scalar::<f32>())
    });
    // Both members weigh the first by 10, the second by 100.
    assert_eq!(sums, [20.0, 200.0, 20.0, 200.0]);
}

#[test]
fn bad_arguments_are_typed_errors_before_anything_is_sent() {
    on_ranks(2, |world| {
        let x = Tensor::<2>::ones([2, 3], &Device::flex());
        let errors = [
            all_to_all(x.clone(), 1, 0, &[1, 1], &world).unwrap_err(),
            all_to_all(x.clone(), 1, 1, &[2, 1], &world).unwrap_err(),
            all_to_all(x.clone(), 2, 0, &[2, 1], &world).unwrap_err(),
            all_gather(x.clone(), 5, &world).unwrap_err(),
            reduce_scatter(x.clone(), 0, &[2], &world).unwrap_err(),
            broadcast(x.clone(), 2, &world).unwrap_err(),
            reduce(x, 7, &world).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| matches!(error, Error::Invalid { .. })));
        world.barrier() // the group is still whole
    });
}
