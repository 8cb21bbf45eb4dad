//! Places beyond 2^31 and 2^32 numbers, computed by the functions that kernels compute them with: in a kernel, of tensors that nobody has.

use cubecl::Device;
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use cubecl::zspace::{shape, strides};

use super::block;
use super::place;
use super::rows::{self, RowsConfig};
use super::table::Labels;

/// What the three ways to a row say, each as a low and a high half.
#[cube(launch_unchecked, address_type = "dynamic")]
fn places<N: Size>(
    one: &Tensor<f32>,
    many: &Tensor<Vector<f32, N>>,
    asked: &[u32],
    said: &mut [u32],
    #[comptime] config: RowsConfig,
) {
    let b = asked[ABSOLUTE_POS * 3] as usize;
    let h = asked[ABSOLUTE_POS * 3 + 1] as usize;
    let i = asked[ABSOLUTE_POS * 3 + 2] as usize;
    let plain = place::row(one, b, h, i);
    let starts = rows::starts::<f32>(one, place::head(one, b, h), i, one.shape(2), config);
    let stepped = starts[0];
    let vectors = block::row_at(&block::rows::<f32, N>(many, b, h), i);
    let at = ABSOLUTE_POS * 6;
    said[at] = u32::cast_from(plain % 65536);
    said[at + 1] = u32::cast_from(plain / 65536);
    said[at + 2] = u32::cast_from(stepped % 65536);
    said[at + 3] = u32::cast_from(stepped / 65536);
    said[at + 4] = u32::cast_from(vectors % 65536);
    said[at + 5] = u32::cast_from(vectors / 65536);
}

#[test]
fn rows_beyond_32_bits_are_found() {
    let client = Device::Cpu(Default::default()).client();
    let (heads, len, dim) = (7usize, 3_000_000usize, 256usize);
    let strides = [heads * len * dim, dim, heads * dim];
    let asked = [[0, 0, 0], [0, 6, 2_999_999], [1, 0, 0], [1, 3, 1_234_567], [2, 6, 2_999_999], [0, 0, 1_198_373]];
    let expected =
        asked.map(|place: [usize; 3]| place.iter().zip(strides).map(|(n, stride)| n * stride).sum::<usize>());
    assert!(expected.iter().any(|at| (1 << 31..1 << 32).contains(at)) && expected.iter().any(|at| *at > 1 << 33));

    let nothing = client.create_from_slice(&[0; 64]);
    let flat: Vec<u32> = asked.iter().flatten().map(|n| *n as u32).collect();
    let (given, said) = (client.create_from_slice(bytemuck::cast_slice(&flat)), client.empty(asked.len() * 24));
    let config = RowsConfig {
        dim,
        lanes: 4,
        vectors: 1,
        step: 1,
        tile: 64,
        dense: true,
        labels: Labels { documents: false, positions: false },
        softcap: false,
        exact: true,
        by_bits: false,
    };
    // SAFETY: the kernel reads shapes and strides of the first two, nothing that they hold; one unit for each place that is asked for.
    unsafe {
        let tensor = || {
            let strides = strides![strides[0], strides[1], strides[2], 1];
            TensorArg::from_raw_parts(nothing.clone(), strides, shape![3, heads, len, dim])
        };
        places::launch_unchecked(
            &client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(asked.len() as u32),
            AddressType::U64,
            4,
            tensor(),
            tensor(),
            BufferArg::from_raw_parts(given, flat.len()),
            BufferArg::from_raw_parts(said.clone(), asked.len() * 6),
            config,
        );
    }
    let bytes = client.read_one(said).unwrap();
    let said: &[u32] = bytemuck::cast_slice(&bytes);
    for (said, (asked, expected)) in said.chunks(6).zip(asked.iter().zip(expected)) {
        let whole = |n: usize| said[2 * n] as usize + said[2 * n + 1] as usize * 65536;
        assert_eq!([whole(0), whole(1), whole(2) * 4], [expected; 3], "{asked:?}");
    }
}
