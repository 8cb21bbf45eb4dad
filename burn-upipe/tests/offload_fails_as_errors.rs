//! Copies that fail are typed errors where the step can catch them: no hang, no panic, nothing left behind, and the next step is
//! clean.

mod offload;

use std::sync::Arc;

use burn::nn::LinearConfig;
use burn::tensor::{Device, Tensor};
use burn_context_parallel::group::launch;
use burn_context_parallel::vjp::AnyTensor;
use burn_context_parallel::{Error, catch};
use burn_upipe::checkpoint::Checkpointed;
use burn_upipe::offload::{
    Arrival, CopyQueue, CopyThread, Departure, Disk, DiskAction, Offload, OffloadConfig, OffloadError, OffloadPolicy,
    Offloaded, Place, Slot, Ticket,
};
use offload::{Failing, Failure, Net, disk_in, host, is_empty, lost, on_disk, settled};
use rstest::rstest;

fn offload_error(error: &Error) -> &OffloadError {
    error.downcast_ref().unwrap_or_else(|| panic!("{error:?}"))
}

/// torchtune#2683: a tracker that was not cleared after a step that was given up.
#[rstest]
fn an_error_in_forward_leaves_nothing_behind(#[values(0, 1, 5)] at: usize, #[values(1, 2, 4)] in_flight: usize) {
    let device = Device::flex().autodiff();
    let net = Net::new(6, &device);
    let expected = net.step(None);
    let offload = Offload::new(OffloadConfig::new().with_in_flight(in_flight)).unwrap();
    let net = net.with(&offload);
    for _ in 0..3 {
        let error = catch(|| net.step(Some(at))).unwrap_err().to_string();
        assert!(error.contains(&format!("block {at} fails")), "{error}");
        is_empty(&offload);
        assert_eq!(net.step(None), expected);
        is_empty(&offload);
    }
}

/// Burn frees it in the next backward pass, or the program says so.
#[test]
fn a_graph_that_is_dropped_leaves_nothing_behind() {
    let offload = host();
    let device = Device::flex().autodiff();
    let net = Net::new(1, &device).with(&offload);
    let forward = || net.blocks[0].forward(Tensor::<2>::ones([16, 8], &device), |linear, x| linear.forward(x));
    let named = offload.save(Tensor::<1>::ones([4], &Device::flex())).unwrap();
    let y = forward();
    assert_eq!(offload.stats().host_bytes, 16 * 8 * 4 + 16);
    offload.give_up();
    assert_eq!(offload.stats().host_bytes, 16, "what was named stays");
    let error = catch(|| drop(y.sum().backward())).unwrap_err();
    assert_eq!(offload_error(&error), &OffloadError::GivenUp);
    drop(named);
    is_empty(&offload);
    drop(forward());
    net.step(None);
    is_empty(&offload);
}

/// Copies 0 to 5 leave, 5 to 0 come back (one or two of them may be taken before they have left).
#[rstest]
fn a_failing_queue_is_an_error_in_the_step(
    #[values(Failure::Error, Failure::Forgotten)] failure: Failure,
    #[values((0, 99), (3, 99), (5, 99), (99, 0), (99, 2))] (out, back): (usize, usize),
    #[values(1, 2, 3)] in_flight: usize,
) {
    let device = Device::flex().autodiff();
    let net = Net::new(6, &device);
    let expected = net.step(None);
    let config = OffloadConfig::new().with_in_flight(in_flight);
    let offload = Offload::with_queue(config, Failing::new(failure, out, back)).unwrap();
    let net = net.with(&offload);
    let error = catch(|| net.step(None)).unwrap_err();
    match failure {
        Failure::Error => assert_eq!(offload_error(&error), &lost()),
        Failure::Forgotten => assert!(error.to_string().contains("the copy queue gave it up"), "{error}"),
    }
    assert!(matches!(offload_error(&error), OffloadError::Copy { .. }));
    assert!(error.to_string().ends_with("run the step again"), "{error}");
    is_empty(&offload);
    assert_eq!(net.step(None), expected, "the next step is clean");
    is_empty(&offload);
}

/// A device without memory panics in the middle of a copy: here, in the reading of a slot that is too small for it.
#[test]
fn a_panic_while_copying_is_an_error() {
    #[derive(Debug)]
    struct WrongShape(CopyThread);
    impl CopyQueue for WrongShape {
        fn copy_out(&self, from: Arc<Departure>, to: Arc<Slot>) -> Ticket<()> {
            self.0.copy_out(from, to)
        }
        fn copy_in(&self, from: Arc<Slot>, to: Arrival) -> Ticket<AnyTensor> {
            self.0.copy_in(from, Arrival { shape: [3, 3].into(), ..to })
        }
    }
    let queue = WrongShape(CopyThread::new().unwrap());
    let offload = Offload::with_queue(OffloadConfig::new().with_in_flight(1), queue).unwrap();
    let saved = offload.save(Tensor::<2>::ones([4, 4], &Device::flex())).unwrap();
    settled(&offload);
    let error = saved.get().unwrap_err();
    assert!(matches!(&error, OffloadError::Copy { bytes: 64, .. }), "{error}");
    drop(saved);
    is_empty(&offload);
}

/// The file becomes shorter than what was written to it, between forward and backward.
#[cfg(target_os = "linux")]
#[rstest]
fn a_file_that_cannot_be_read_is_an_error_in_backward(#[values(1, 2, 6)] in_flight: usize) {
    let folder = tempfile::tempdir().unwrap();
    let config = on_disk(OffloadConfig::new(), None).with_disk(disk_in(folder.path(), None)).with_in_flight(in_flight);
    let offload = Offload::new(config).unwrap();
    let net = Net::new(6, &Device::flex().autodiff());
    let expected = net.step(None);
    let net = net.with(&offload);
    let named = offload.save(Tensor::<1>::ones([1], &Device::flex())).unwrap();
    let loss = net.loss(None);
    settled(&offload);
    assert_eq!(offload.stats().disk_bytes, 6 * 16 * 8 * 4 + 4);
    // It has no name: only its handle leads there.
    let handles = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let of_folder = |path: &std::path::PathBuf| std::fs::read_link(path).is_ok_and(|to| to.starts_with(folder.path()));
    let file = handles.map(|handle| handle.path()).find(of_folder).expect("the file");
    std::fs::OpenOptions::new().write(true).open(file).unwrap().set_len(16).unwrap();
    let error = catch(|| drop(loss.backward())).unwrap_err();
    assert!(
        matches!(
            offload_error(&error),
            OffloadError::Disk {
                action: DiskAction::Reading,
                kind: std::io::ErrorKind::UnexpectedEof,
                bytes: 512,
                folder: at,
                ..
            } if at == folder.path()
        ),
        "{error:?}"
    );
    assert!(error.to_string().contains("run the step again"), "{error}");
    assert!(named.take().unwrap().into_data().iter::<f32>().eq([1.0]), "what lies before the end is there");
    is_empty(&offload);
    assert_eq!(net.step(None), expected, "the next step writes it again");
    is_empty(&offload);
}

#[test]
fn other_ranks_are_told() {
    let error = launch(3, |world| {
        let device = Device::flex().autodiff();
        let offload = match world.rank() {
            1 => Offload::with_queue(OffloadConfig::new().with_in_flight(1), Failing::new(Failure::Error, 2, 99)),
            _ => Ok(host()),
        }?;
        let net = Net::new(6, &device).with(&offload);
        for _ in 0..3 {
            net.step(None);
            world.barrier()?;
        }
        Ok::<_, Error>(())
    })
    .unwrap_err();
    assert_eq!(error.rank(), Some(1), "{error}");
    let own = error.downcast_ref::<Error>().unwrap();
    assert_eq!(offload_error(own), &lost());
}

#[test]
fn another_rank_gets_the_cause() {
    let causes = launch(2, |world| {
        let offload = Offload::with_queue(OffloadConfig::new(), Failing::new(Failure::Error, 0, 99))?;
        if world.rank() == 1 {
            let net = Net::new(2, &Device::flex().autodiff()).with(&offload);
            let error = catch(|| net.step(None)).unwrap_err();
            world.fail(error.to_string());
            return Ok(None);
        }
        let Err(Error::Group(error)) = world.barrier() else { panic!("rank 1 never came") };
        Ok::<_, Error>(Some(error.cause))
    });
    let text = format!("{causes:?}");
    assert!(text.contains("fell off the bus"), "{text}");
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let refused = |config: OffloadConfig, what: &str| {
        let error = Offload::new(config).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    };
    refused(OffloadConfig::new().with_in_flight(0), "0 tensors in flight: use at least 1");
    refused(OffloadConfig::new().with_policy(OffloadPolicy::Every(0)), "every 0th tensor: use 1 for all");
    refused(OffloadConfig::new().with_place(Place::Disk), "no folder is given");
    let nowhere = Disk { folder: "no/such/folder".into(), budget: None };
    refused(OffloadConfig::new().with_disk(Some(nowhere)), "no/such/folder");
    // An engine beside a checkpoint that is off.
    let device = Device::flex().autodiff();
    let linear = Checkpointed::new(LinearConfig::new(8, 8).init(&device)).enabled(false);
    let block = Offloaded::new(linear).with(Some(&host()));
    let error = catch(|| block.forward(Tensor::<2>::ones([2, 8], &device), |linear, x| linear.forward(x))).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
}
