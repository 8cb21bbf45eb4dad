//! What the tests of offload share: engines, queues that are late or fail, and tensors that say who they are.
#![allow(dead_code)] // each test binary uses a part

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::{sleep, spawn};
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_context_parallel::Error;
use burn_context_parallel::vjp::AnyTensor;
use burn_upipe::checkpoint::Checkpointed;
use burn_upipe::offload::{
    Arrival, CopyQueue, CopyThread, Departure, Disk, Offload, OffloadConfig, OffloadError, Offloaded, Place, Slot,
    Ticket,
};

/// An engine to host memory.
pub fn host() -> Offload {
    Offload::new(OffloadConfig::new()).expect("an engine")
}

/// Settings for a file in the folder for temporary files.
pub fn on_disk(config: OffloadConfig, budget: Option<u64>) -> OffloadConfig {
    config.with_place(Place::Disk).with_disk(disk(budget))
}

pub fn disk(budget: Option<u64>) -> Option<Disk> {
    disk_in(&std::env::temp_dir(), budget)
}

pub fn disk_in(folder: &Path, budget: Option<u64>) -> Option<Disk> {
    Some(Disk { folder: folder.to_owned(), budget })
}

/// A tensor of so many f32, each of them `value`.
pub fn filled(len: usize, value: f32) -> Tensor<1> {
    Tensor::full([len], value, &Device::flex())
}

/// Copies late, each by another time, and out of order.
#[derive(Debug)]
pub struct Late {
    inner: Arc<CopyThread>,
    copies: AtomicUsize,
}

impl Late {
    pub fn new() -> Self {
        Self { inner: Arc::new(CopyThread::new().expect("a thread")), copies: AtomicUsize::new(0) }
    }

    fn later<T: Send + 'static>(&self, copy: impl FnOnce(&CopyThread) -> Ticket<T> + Send + 'static) -> Ticket<T> {
        let delay = Duration::from_micros([300, 0, 900, 100, 500][self.copies.fetch_add(1, SeqCst) % 5]);
        let ((ticket, promise), inner) = (Ticket::new(), self.inner.clone());
        spawn(move || {
            sleep(delay);
            promise.settle(copy(&inner).take());
        });
        ticket
    }
}

impl CopyQueue for Late {
    fn copy_out(&self, from: Arc<Departure>, to: Arc<Slot>) -> Ticket<()> {
        self.later(|queue| queue.copy_out(from, to))
    }

    fn copy_in(&self, from: Arc<Slot>, to: Arrival) -> Ticket<AnyTensor> {
        self.later(|queue| queue.copy_in(from, to))
    }
}

/// How a copy fails.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Failure {
    /// With an error.
    Error,
    /// Its promise is dropped.
    Forgotten,
}

/// Lets so many copies of each direction pass, then one fails; later ones pass again.
#[derive(Debug)]
pub struct Failing {
    inner: CopyThread,
    failure: Failure,
    out: AtomicUsize,
    back: AtomicUsize,
}

impl Failing {
    pub fn new(failure: Failure, out: usize, back: usize) -> Self {
        let inner = CopyThread::new().expect("a thread");
        Self { inner, failure, out: AtomicUsize::new(out), back: AtomicUsize::new(back) }
    }

    fn fails<T>(&self, left: &AtomicUsize) -> Option<Ticket<T>> {
        let left = left.fetch_sub(1, SeqCst);
        (left == 0).then(|| match self.failure {
            Failure::Error => Ticket::settled(Err(lost())),
            Failure::Forgotten => Ticket::new().0,
        })
    }
}

/// What a failing queue says.
pub fn lost() -> OffloadError {
    OffloadError::Copy { action: "copying", bytes: 7, problem: "the device fell off the bus".to_owned() }
}

impl CopyQueue for Failing {
    fn copy_out(&self, from: Arc<Departure>, to: Arc<Slot>) -> Ticket<()> {
        self.fails(&self.out).unwrap_or_else(|| self.inner.copy_out(from, to))
    }

    fn copy_in(&self, from: Arc<Slot>, to: Arrival) -> Ticket<AnyTensor> {
        self.fails(&self.back).unwrap_or_else(|| self.inner.copy_in(from, to))
    }
}

/// The bytes of a tensor.
pub fn bytes<const D: usize>(x: Tensor<D>) -> Vec<u8> {
    x.into_data().as_bytes().to_vec()
}

/// Blocks whose inputs are kept.
#[derive(Module, Debug)]
pub struct Net {
    pub blocks: Vec<Offloaded<Checkpointed<Linear>>>,
}

impl Net {
    pub fn new(blocks: usize, device: &Device) -> Self {
        let linear = || LinearConfig::new(8, 8).init(device);
        let net = Self { blocks: (0..blocks).map(|_| Offloaded::new(Checkpointed::new(linear()))).collect() };
        net.fork(device)
    }

    pub fn with(mut self, offload: &Offload) -> Self {
        self.blocks = self.blocks.into_iter().map(|block| block.with(Some(offload))).collect();
        self
    }

    /// The sum of what comes out. Block `fails` panics in forward.
    pub fn loss(&self, fails: Option<usize>) -> Tensor<1> {
        let mut x = Tensor::<2>::ones([16, 8], &Device::flex().autodiff());
        for (i, block) in self.blocks.iter().enumerate() {
            x = block.forward(x, move |linear: &Linear, x| {
                if fails == Some(i) {
                    burn_context_parallel::raise(Error::invalid("block", format!("block {i} fails"), "never mind"));
                }
                linear.forward(x).tanh()
            });
        }
        x.sum()
    }

    /// The loss, and the gradient of the first weight.
    pub fn step(&self, fails: Option<usize>) -> (f32, TensorData) {
        let loss = self.loss(fails);
        let grads = loss.backward();
        (loss.into_scalar::<f32>(), self.blocks[0].inner.inner.weight.val().grad(&grads).unwrap().into_data())
    }
}

/// Nothing is saved, and nothing on its way.
pub fn is_empty(offload: &Offload) {
    let stats = offload.stats();
    assert_eq!((stats.saved, stats.host_bytes, stats.disk_bytes), (0, 0, 0), "{stats:?}");
    assert_eq!((stats.in_flight, stats.device_bytes), (0, 0), "{stats:?}");
}

/// Waits until nothing is on its way.
pub fn settled(offload: &Offload) {
    while offload.stats().in_flight > 0 {
        std::thread::yield_now();
    }
}

/// Copies like a thread, and counts what came back.
#[derive(Debug)]
pub struct Counting {
    inner: CopyThread,
    /// How many copies back have begun.
    pub back: Arc<AtomicUsize>,
}

impl Counting {
    pub fn new() -> Self {
        Self { inner: CopyThread::new().expect("a thread"), back: Arc::default() }
    }
}

impl CopyQueue for Counting {
    fn copy_out(&self, from: Arc<Departure>, to: Arc<Slot>) -> Ticket<()> {
        self.inner.copy_out(from, to)
    }

    fn copy_in(&self, from: Arc<Slot>, to: Arrival) -> Ticket<AnyTensor> {
        self.back.fetch_add(1, SeqCst);
        self.inner.copy_in(from, to)
    }
}
