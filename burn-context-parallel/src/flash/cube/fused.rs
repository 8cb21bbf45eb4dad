//! Attention among Burn's deferred operations: opaque, run when its turn comes.

use std::fmt;

use burn::backend::ExecutionError;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use burn_fusion::custom::{CustomOpIr, HandleContainer, Operation, OperationIr, StreamId, TensorIr};
use burn_fusion::{Fusion, FusionBackend, FusionTensor};

use super::super::{FlashOps, FlashOptions};

type Fused<B> = FusionTensor<<B as FusionBackend>::FusionRuntime>;
/// What runs: from inputs to outputs.
type Run<B> = dyn Fn(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> + Send + Sync;

struct Deferred<B: FusionBackend> {
    ir: CustomOpIr,
    run: Box<Run<B>>,
}

impl<B: FusionBackend> fmt::Debug for Deferred<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ir.fmt(f)
    }
}

impl<B: FusionBackend> Operation<B::FusionRuntime> for Deferred<B> {
    fn execute(&self, handles: &mut HandleContainer<B::Handle>) -> Result<(), ExecutionError> {
        let inputs = self.ir.inputs.iter().map(|input| handles.get_float_tensor::<B>(input)).collect();
        for (output, tensor) in self.ir.outputs.iter().zip((self.run)(inputs)) {
            handles.register_float_tensor::<B>(&output.id, tensor);
        }
        Ok(())
    }
}

/// Puts `run` among the operations of this thread; its outputs have the shapes and types that are given.
fn defer<B: FusionBackend, const N: usize>(
    name: &'static str,
    inputs: Vec<Fused<B>>,
    outputs: [(Shape, DType); N],
    run: impl Fn(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> + Send + Sync + 'static,
) -> [Fused<B>; N] {
    let client = inputs[0].client.clone();
    let outputs = outputs.map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype));
    let inputs: Vec<TensorIr> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let ir = CustomOpIr::new(name, &inputs, &outputs);
    let deferred = Deferred::<B> { ir: ir.clone(), run: Box::new(run) };
    let made = client.register(StreamId::current(), OperationIr::Custom(ir), deferred);
    made.try_into().unwrap_or_else(|_| unreachable!("as many outputs as were asked for"))
}

/// As many as there are, from a list.
fn list<T, const N: usize>(items: Vec<T>) -> [T; N] {
    items.try_into().unwrap_or_else(|_| unreachable!("an operation gets what it was registered with"))
}

fn rows(q: &Shape) -> Shape {
    Shape::from([q[0], q[1], q[2]])
}

impl<B: FusionBackend + FlashOps> FlashOps for Fusion<B> {
    fn flash_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [(q.shape.clone(), options.result_dtype(q.dtype)), (rows(&q.shape), DType::F32)];
        let [out, lse] = defer::<B, 2>("flash_forward", vec![q, k, v], outputs, move |inputs| {
            let [q, k, v] = list(inputs);
            let (out, lse) = B::flash_forward(q, k, v, options.clone());
            vec![out, lse]
        });
        (out, lse)
    }

    fn flash_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = options.result_dtype(q.dtype);
        let outputs = [&q, &k, &v].map(|t| (t.shape.clone(), dtype));
        let [dq, dk, dv] = defer::<B, 3>("flash_backward", vec![q, k, v, d_out, lse, delta], outputs, move |inputs| {
            let [q, k, v, d_out, lse, delta] = list(inputs);
            let (dq, dk, dv) = B::flash_backward(q, k, v, d_out, lse, delta, options.clone());
            vec![dq, dk, dv]
        });
        (dq, dk, dv)
    }

    fn flash_backward_onto(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        dk: FloatTensor<Self>,
        dv: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = options.result_dtype(q.dtype);
        let outputs = [&q, &k, &v].map(|t| (t.shape.clone(), dtype));
        let inputs = vec![q, k, v, d_out, lse, delta, dk, dv];
        let [dq, dk, dv] = defer::<B, 3>("flash_backward_onto", inputs, outputs, move |inputs| {
            let [q, k, v, d_out, lse, delta, dk, dv] = list(inputs);
            let (dq, dk, dv) = B::flash_backward_onto(q, k, v, d_out, lse, delta, dk, dv, options.clone());
            vec![dq, dk, dv]
        });
        (dq, dk, dv)
    }

    fn flash_delta(d_out: FloatTensor<Self>, out: FloatTensor<Self>) -> FloatTensor<Self> {
        let outputs = [(rows(&out.shape), DType::F32)];
        let [delta] = defer::<B, 1>("flash_delta", vec![d_out, out], outputs, |inputs| {
            let [d_out, out] = list(inputs);
            vec![B::flash_delta(d_out, out)]
        });
        delta
    }

    fn flash_delta_less(
        d_out: FloatTensor<Self>,
        out: FloatTensor<Self>,
        d_lse: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let outputs = [(rows(&out.shape), DType::F32)];
        let [delta] = defer::<B, 1>("flash_delta_less", vec![d_out, out, d_lse], outputs, |inputs| {
            let [d_out, out, d_lse] = list(inputs);
            vec![B::flash_delta_less(d_out, out, d_lse)]
        });
        delta
    }
}
