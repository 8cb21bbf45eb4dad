//! Axes divide the world: every rank is on one line of each, and lines do not overlap.

use burn_context_parallel::Error;
use burn_context_parallel::group::{Axis, Mesh, MeshShape, ProcessGroup, launch};
use rstest::rstest;

fn shape(data: usize, ring: usize, ulysses: usize) -> MeshShape {
    MeshShape { data, ring, ulysses }
}

fn on_mesh<T: Send + 'static>(
    shape: MeshShape,
    f: impl Fn(&Mesh) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    launch(shape.ranks().unwrap(), move |world| f(&Mesh::new(&world, shape)?)).unwrap()
}

#[test]
fn ulysses_is_fastest_then_ring_then_data() {
    let axes = on_mesh(shape(2, 2, 2), |mesh| {
        let c = mesh.coordinates();
        let members = Axis::ALL.map(|axis| mesh.axis(axis).members().to_vec());
        Ok(((c.data, c.ring, c.ulysses), members))
    });
    let line = |a, b| vec![a, b];
    assert_eq!(
        axes,
        [
            ((0, 0, 0), [line(0, 4), line(0, 2), line(0, 1)]),
            ((0, 0, 1), [line(1, 5), line(1, 3), line(0, 1)]),
            ((0, 1, 0), [line(2, 6), line(0, 2), line(2, 3)]),
            ((0, 1, 1), [line(3, 7), line(1, 3), line(2, 3)]),
            ((1, 0, 0), [line(0, 4), line(4, 6), line(4, 5)]),
            ((1, 0, 1), [line(1, 5), line(5, 7), line(4, 5)]),
            ((1, 1, 0), [line(2, 6), line(4, 6), line(6, 7)]),
            ((1, 1, 1), [line(3, 7), line(5, 7), line(6, 7)]),
        ]
    );
}

#[rstest]
#[case(shape(1, 1, 1))]
#[case(shape(4, 1, 1))]
#[case(shape(1, 3, 1))]
#[case(shape(1, 1, 8))]
#[case(shape(2, 1, 3))]
#[case(shape(3, 2, 1))]
#[case(shape(1, 2, 4))]
fn a_line_has_the_axis_degree_and_counts_coordinates(#[case] shape: MeshShape) {
    on_mesh(shape, move |mesh| {
        for axis in Axis::ALL {
            assert_eq!(mesh.axis(axis).size(), shape.degree(axis));
            assert_eq!(mesh.axis(axis).rank(), mesh.coordinates().on(axis));
            assert_eq!(mesh.axis(axis).world_rank(), mesh.world().rank());
        }
        assert_eq!(mesh.shape(), shape);
        Ok(())
    });
}

#[test]
fn several_axes_together_are_a_plane_in_world_order() {
    let planes = on_mesh(shape(2, 3, 2), |mesh| {
        let plane = mesh.over(&[Axis::Ulysses, Axis::Ring])?;
        assert_eq!(plane.members(), mesh.over(&[Axis::Ring, Axis::Ulysses])?.members());
        assert_eq!(mesh.over(&[])?.members(), [mesh.world().rank()]);
        assert_eq!(mesh.over(&Axis::ALL)?.members(), mesh.world().members());
        assert_eq!(mesh.over(&[Axis::Data])?.members(), mesh.axis(Axis::Data).members());
        plane.barrier()?;
        Ok(plane.members().to_vec())
    });
    assert_eq!(planes[4], [0, 1, 2, 3, 4, 5]);
    assert_eq!(planes[7], [6, 7, 8, 9, 10, 11]);
}

/// A mesh of a subgroup stays within it.
#[test]
fn a_mesh_can_divide_a_subgroup() {
    let lines = launch(6, |world| -> Result<_, Error> {
        if world.rank() < 2 {
            return Ok(vec![]);
        }
        let four = world.subgroup(&[2, 3, 4, 5])?;
        let mesh = Mesh::new(&four, shape(1, 2, 2))?;
        mesh.axis(Axis::Ring).barrier()?;
        Ok(mesh.axis(Axis::Ring).members().to_vec())
    });
    assert_eq!(lines.unwrap(), [vec![], vec![], vec![2, 4], vec![3, 5], vec![2, 4], vec![3, 5]]);
}

#[rstest]
#[case(shape(2, 1, 3), 4, "data=2 x ulysses=3 needs 6 ranks, 4 were launched: launch 6, or use ulysses=2")]
#[case(shape(3, 2, 1), 8, "data=3 x ring=2 needs 6 ranks, 8 were launched: launch 6, or use data=4")]
#[case(shape(1, 1, 1), 4, "data=1 needs 1 rank, 4 were launched: launch 1, or use ulysses=4")]
#[case(
    shape(3, 2, 5),
    7,
    "data=3 x ring=2 x ulysses=5 needs 30 ranks, 7 were launched: launch 30, or change several degrees so that they multiply to 7"
)]
#[case(shape(0, 1, 2), 2, "data=0 leaves no rank: an axis that is not used has degree 1: data=1")]
#[case(shape(usize::MAX, 2, 1), 2, "is more ranks than can be counted: use smaller degrees")]
fn a_shape_that_does_not_fit_says_the_whole_equation(
    #[case] shape: MeshShape,
    #[case] ranks: usize,
    #[case] message: &str,
) {
    let refused = shape.check(ranks).unwrap_err().to_string();
    assert!(refused.starts_with("mesh: ") && refused.ends_with(message), "{refused}");
}

#[test]
fn a_mesh_of_one_needs_no_launch() {
    let mesh = Mesh::single();
    assert_eq!(mesh.axis(Axis::Ulysses).size(), 1);
    assert_eq!(Mesh::new(&ProcessGroup::single(), MeshShape::default()).unwrap().coordinates(), mesh.coordinates());
    assert!(Mesh::new(&ProcessGroup::single(), shape(1, 1, 2)).is_err());
}
