//! Starts kernels: sizes, buffers, and how many of what.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape, TensorData};
use burn_cubecl::CubeBackend;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;

use super::super::blueprint::{Blueprint, DeviceLimits, Family, Tiles};
use super::super::{FlashOptions, FlashShape};
use super::block::{BlockConfig, block_forward, block_keys, block_queries};
use super::device;
use super::rows::{RowsConfig, rows_forward, rows_keys, rows_queries};
use super::table::{Labels, expect_lengths, table};
use crate::Result;

/// One attention on one device, about to be started.
#[derive(Clone)]
pub(super) struct Launch {
    shape: FlashShape,
    options: FlashOptions,
    limits: DeviceLimits,
    blueprint: Blueprint,
    client: Client,
    dtype: DType,
    scalars: Scalars,
}

/// What kernels are told at run time.
#[derive(Clone, Copy)]
struct Scalars {
    scale: f32,
    /// What `scale` lacks of the number that it stands for.
    scale_rest: f32,
    cap: f32,
}

/// How one kernel is started.
struct Plan {
    tiles: Tiles,
    /// Whether the numbers of each row that is read lie side by side.
    dense: bool,
    count: CubeCount,
    dim: CubeDim,
    address: AddressType,
}

/// Starts the kernel of the blueprint's family: two kernels that take the same, but for what they are compiled for.
macro_rules! start {
    (
        $this:ident, $plan:ident, ($rows:ident, $block:ident),
        reads($($read:ident),+), table($table:ident), writes($($written:ident),+), with($($more:ident)?)
    ) => {{
        let Scalars { scale, scale_rest, cap } = $this.scalars;
        let dtypes = [$this.dtype, $this.results()].map(dtype_to_elem_type);
        let Plan { tiles, dense, count, dim, address } = $plan;
        macro_rules! start_one {
            ($kernel:ident, $config:expr) => {
                // SAFETY: kernels read and write only inside the shapes of their tensors, which were checked, and inside the table.
                unsafe {
                    $kernel::launch_unchecked(
                        &$this.client,
                        count,
                        dim,
                        address,
                        tiles.vector,
                        $($read.into_tensor_arg(),)+
                        $table,
                        $($written.into_tensor_arg(),)+
                        scale,
                        scale_rest,
                        cap,
                        0,
                        $($more,)?
                        $config,
                        dtypes,
                    )
                }
            };
        }
        match $this.blueprint.family {
            Family::Rows => start_one!($rows, $this.rows_config(&tiles, dense)),
            Family::Block => start_one!($block, $this.block_config(&tiles)),
        }
    }};
}

/// Of the family `rows`, about so many rows of the other side share one entry of the table.
const TILE: usize = 64;

impl Launch {
    pub fn new(operation: &'static str, shape: FlashShape, q: &CubeTensor, options: FlashOptions) -> Result<Self> {
        let scale = options.resolved_scale(shape.head_dim);
        let scalars = Scalars {
            scale: scale as f32,
            scale_rest: (scale - f64::from(scale as f32)) as f32,
            cap: options.softcap.unwrap_or(1.0) as f32,
        };
        let limits = device::limits(&q.client);
        let blueprint = device::blueprint(&limits, shape.head_dim, &options)?;
        // Where a backend calls the kernels itself: nobody has looked.
        expect_lengths(operation, &shape, &options)?;
        Ok(Self { shape, options, limits, blueprint, client: q.client.clone(), dtype: q.dtype(), scalars })
    }

    fn results(&self) -> DType {
        self.options.result_dtype(self.dtype)
    }

    fn empty(&self, like: &CubeTensor, shape: &[usize], dtype: DType) -> CubeTensor {
        empty_device_contiguous_dtype(self.client.clone(), like.device.clone(), Shape::from(shape.to_vec()), dtype)
    }

    fn zeros(&self, like: &CubeTensor, shape: &[usize], dtype: DType) -> CubeTensor {
        zeros_client(self.client.clone(), like.device.clone(), Shape::from(shape.to_vec()), dtype)
    }

    /// The mask as a buffer, for tiles of so many queries and keys.
    fn table(&self, tiles: [usize; 2]) -> BufferArg {
        let table = table(&self.options, &self.shape, tiles);
        let handle = self.client.create_from_slice(bytemuck::cast_slice(&table));
        // SAFETY: the buffer holds that many numbers.
        unsafe { BufferArg::from_raw_parts(handle, table.len()) }
    }

    pub fn forward(&self, q: CubeTensor, k: CubeTensor, v: CubeTensor) -> (CubeTensor, CubeTensor) {
        let shape = &self.shape;
        if shape.q().contains(&0) || shape.kv().contains(&0) {
            return (self.zeros(&q, &shape.q(), self.results()), self.counted(&q));
        }
        let out = self.empty(&q, &shape.q(), self.results());
        let lse = self.empty(&q, &shape.rows(), DType::F32);
        let sizes = of_queries(shape);
        let (tensors, results) = ([q.clone(), k, v], [out.clone(), lse.clone()]);
        self.fastest(FORWARD, &self.blueprint.forward, sizes, &q, move |this, tiles| {
            this.start_forward(tiles, tensors.clone(), results.clone());
            results[0].clone()
        });
        (out, lse)
    }

    /// The log-sum-exp without dimensions, where every score is 0, or without keys.
    fn counted(&self, like: &CubeTensor) -> CubeTensor {
        let FlashShape { q_heads, q_len, k_len, .. } = self.shape;
        let rows = self.shape.rows();
        let of = |row: usize| {
            let (b, i) = (row / (q_heads * q_len), row % q_len);
            ((0..k_len).filter(|j| self.options.sees(b, i, *j)).count() as f64).ln() as f32
        };
        let values: Vec<f32> = (0..rows.iter().product()).map(of).collect();
        CubeBackend::float_from_data(TensorData::new(values, rows.to_vec()), &like.device)
    }

    /// dq, dk and dv, the latter added to `onto`.
    pub fn backward(
        &self,
        inputs: [CubeTensor; 4],
        statistics: [CubeTensor; 2],
        onto: Option<[CubeTensor; 2]>,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let (shape, like) = (&self.shape, inputs[0].clone());
        if shape.q().contains(&0) || shape.kv().contains(&0) {
            let zeros = |shape: &[usize]| self.zeros(&like, shape, self.results());
            let [dk, dv] = onto.unwrap_or_else(|| [0; 2].map(|_| zeros(&shape.kv())));
            return (zeros(&shape.q()), dk, dv);
        }
        let adds = onto.is_some();
        // Written in place where nobody else holds them.
        let own = |sum: CubeTensor| if sum.can_mut() && sum.is_contiguous() { sum } else { sum.copy() };
        let [dk, dv] = match onto {
            Some(sums) => sums.map(own),
            None => [0; 2].map(|_| self.empty(&like, &shape.kv(), self.results())),
        };
        let dq = self.empty(&like, &shape.q(), self.results());
        let sizes = of_queries(shape);
        let (tensors, rows, result) = (inputs.clone(), statistics.clone(), dq.clone());
        self.fastest(QUERIES, &self.blueprint.queries, sizes, &like, move |this, tiles| {
            this.start_queries(tiles, tensors.clone(), rows.clone(), result.clone());
            result.clone()
        });
        let results = [dk.clone(), dv.clone()];
        if adds {
            // Trying would add again and again.
            self.start_keys(&self.blueprint.keys, inputs, statistics, results, true);
        } else {
            let sizes = of_keys(shape);
            self.fastest(KEYS, &self.blueprint.keys, sizes, &like, move |this, tiles| {
                this.start_keys(tiles, inputs.clone(), statistics.clone(), results.clone(), false);
                results[0].clone()
            });
        }
        (dq, dk, dv)
    }

    /// Starts a kernel: with the blueprint's tiles, or if nobody forced them with the fastest that give the same bits.
    fn fastest(
        &self,
        kernel: &str,
        tiles: &Tiles,
        sizes: [usize; 3],
        like: &CubeTensor,
        start: impl Fn(&Self, &Tiles) -> CubeTensor + Send + Sync + 'static,
    ) {
        #[cfg(feature = "autotune")]
        if self.options.blueprint.is_none() {
            use super::tune::{Start, fastest, key};
            let (this, family) = (self.clone(), self.blueprint.family);
            let key = key(&self.shape, self.dtype, &self.options, family, kernel, sizes);
            let alternatives = tiles.alternatives(family);
            let start = move |n: usize| {
                let tiles = alternatives[n];
                let one = Blueprint { family, forward: tiles, queries: tiles, keys: tiles };
                one.check(&this.limits, this.shape.head_dim).map_err(|error| error.to_string())?;
                Ok(start(&this, &tiles))
            };
            fastest(key, like, Start(std::sync::Arc::new(start)));
            return;
        }
        let _ = (kernel, sizes, like);
        start(self, tiles);
    }

    /// Processors without an instruction that rounds to bf16 call a function for it, which not every system has.
    fn by_bits(&self) -> bool {
        self.results() == DType::BF16 && self.limits.plane == 1
    }

    fn rows_config(&self, tiles: &Tiles, dense: bool) -> RowsConfig {
        RowsConfig {
            dim: self.shape.head_dim,
            lanes: tiles.vector,
            vectors: tiles.own / tiles.vector,
            step: tiles.step,
            tile: tile(Family::Rows, tiles),
            dense,
            labels: Labels::of(&self.options),
            softcap: self.options.softcap.is_some(),
            exact: self.dtype == DType::F32,
            by_bits: self.by_bits(),
        }
    }

    fn block_config(&self, tiles: &Tiles) -> BlockConfig {
        let softcap = self.options.softcap.is_some();
        let (labels, exact) = (Labels::of(&self.options), self.dtype == DType::F32);
        BlockConfig::new(self.shape.head_dim, tiles, labels, softcap, exact, self.by_bits())
    }

    /// How a kernel is started for `rows` rows of each of `heads` heads, reading `read` and writing `written`.
    fn plan<const N: usize, const M: usize>(
        &self,
        tiles: &Tiles,
        [heads, rows]: [usize; 2],
        read: [&CubeTensor; N],
        written: [&CubeTensor; M],
    ) -> Plan {
        let all = || read.into_iter().chain(written);
        let tiles = self.readable(tiles, all());
        let blocks = self.shape.batch * heads * rows.div_ceil(tiles.own);
        let each = match self.blueprint.family {
            Family::Rows => tiles.units,
            Family::Block => 1,
        };
        let address = match self.blueprint.family {
            // What a processor adds to its pointers anyway: sums in 32 bits are a step more.
            Family::Rows if self.limits.wide_addresses => AddressType::U64,
            _ => address(all()),
        };
        Plan {
            tiles,
            dense: read.iter().all(|tensor| tensor.meta.strides()[3] == 1),
            count: cubes(blocks.div_ceil(each)),
            dim: CubeDim::new_1d(tiles.units as u32),
            address,
        }
    }

    /// The tiles with a vector that the tensors can be read by: of the family `block`, along the head dimension.
    fn readable<'a>(&self, tiles: &Tiles, mut tensors: impl Iterator<Item = &'a CubeTensor>) -> Tiles {
        let fits = |tensor: &CubeTensor| {
            let strides = tensor.meta.strides();
            let offset = tensor.handle.offset_start.unwrap_or(0) as usize / tensor.dtype.size();
            strides[3] == 1 && strides[..3].iter().chain([&offset]).all(|stride| stride.is_multiple_of(tiles.vector))
        };
        // A vector beyond the last number of a row would read what lies between rows.
        let whole = self.shape.head_dim.is_multiple_of(tiles.vector);
        match self.blueprint.family {
            Family::Block if !whole || !tensors.all(fits) => Tiles { vector: 1, ..*tiles },
            _ => *tiles,
        }
    }

    fn start_forward(&self, tiles: &Tiles, [q, k, v]: [CubeTensor; 3], [out, lse]: [CubeTensor; 2]) {
        let plan = self.plan(tiles, [self.shape.q_heads, self.shape.q_len], [&q, &k, &v], [&out]);
        let table = self.table([plan.tiles.own, tile(self.blueprint.family, &plan.tiles)]);
        start!(self, plan, (rows_forward, block_forward), reads(q, k, v), table(table), writes(out, lse), with());
    }

    fn start_queries(
        &self,
        tiles: &Tiles,
        [q, k, v, d_out]: [CubeTensor; 4],
        [lse, delta]: [CubeTensor; 2],
        dq: CubeTensor,
    ) {
        let plan = self.plan(tiles, [self.shape.q_heads, self.shape.q_len], [&q, &k, &v, &d_out], [&dq]);
        let table = self.table([plan.tiles.own, tile(self.blueprint.family, &plan.tiles)]);
        start!(
            self,
            plan,
            (rows_queries, block_queries),
            reads(q, k, v, d_out, lse, delta),
            table(table),
            writes(dq),
            with()
        );
    }

    fn start_keys(
        &self,
        tiles: &Tiles,
        [q, k, v, d_out]: [CubeTensor; 4],
        [lse, delta]: [CubeTensor; 2],
        [dk, dv]: [CubeTensor; 2],
        onto: bool,
    ) {
        let plan = self.plan(tiles, [self.shape.kv_heads, self.shape.k_len], [&q, &k, &v, &d_out], [&dk, &dv]);
        let table = self.table([tile(self.blueprint.family, &plan.tiles), plan.tiles.own]);
        start!(
            self,
            plan,
            (rows_keys, block_keys),
            reads(q, k, v, d_out, lse, delta),
            table(table),
            writes(dk, dv),
            with(onto)
        );
    }
}

/// Rows of the other side whose labels share an entry of the table.
pub(super) fn tile(family: Family, tiles: &Tiles) -> usize {
    match family {
        Family::Rows => TILE.next_multiple_of(tiles.step),
        Family::Block => tiles.step,
    }
}

pub(super) const FORWARD: &str = "forward";
pub(super) const QUERIES: &str = "dq";
pub(super) const KEYS: &str = "dk and dv";

/// Heads, own rows and the other side's, of the kernels that own queries.
pub(super) fn of_queries(shape: &FlashShape) -> [usize; 3] {
    [shape.q_heads, shape.q_len, shape.k_len]
}

/// The same of the kernel that owns keys.
pub(super) fn of_keys(shape: &FlashShape) -> [usize; 3] {
    [shape.kv_heads, shape.k_len, shape.q_len]
}

/// So many cubes, or a few more, in a grid of which no side is longer than devices allow (of fewer than 2^32 cubes).
pub(super) fn cubes(count: usize) -> CubeCount {
    const SIDE: usize = 65535;
    let rows = count.div_ceil(SIDE).max(1);
    CubeCount::Static(count.div_ceil(rows) as u32, rows as u32, 1)
}

pub(super) fn address<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> AddressType {
    tensors.into_iter().map(CubeTensor::required_address_type).max().unwrap_or_default()
}
