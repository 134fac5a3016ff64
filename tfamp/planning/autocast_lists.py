"""Which ops autocast computes in float32 or promotes, beyond what the colours say; framework-free.

`tfamp.graph.op_lists` derives autocast's three sets from these and from the colours.
"""

from __future__ import annotations

from tfamp.planning.structures import op_types

# Sensitive to rounding or overflow: PyTorch's autocast computes their counterparts in float32.
PRECISE = frozenset(
    {
        "Acos",
        "Asin",
        "Cosh",
        "Cumprod",
        "Cumsum",
        "CumulativeLogsumexp",
        "Erfinv",
        "EuclideanNorm",
        "Exp",
        "Expm1",
        "Inv",
        "L2Loss",
        "Log",
        "Log1p",
        "LogSoftmax",
        "Mean",  # not PyTorch's: Grappler denies it in float16, and it is a sum first
        "Ndtri",
        "Pow",
        "Prod",
        "Reciprocal",
        "ResizeBicubic",
        "ResizeBilinear",
        "Rsqrt",
        "ScaleAndTranslate",
        "Sinh",
        "Softmax",
        "SoftmaxCrossEntropyWithLogits",
        "Softplus",
        "SparseSoftmax",
        "SparseSoftmaxCrossEntropyWithLogits",
        "Square",  # PyTorch's is a power
        "SquaredDifference",  # PyTorch's mse_loss
        "Sum",
        "Tan",
        "Xlog1py",  # with Xlogy: what PyTorch's kl_div is made of
        "Xlogy",
    }
)

# Decompositions, solvers, transforms and others whose kernels, for some device at least, are
# float32 and float64 only: a low-precision input would be an error. Where PyTorch has the op, its
# autocast does the same. The inputs of CTCLossV2 are float32 without a type attribute.
FLOAT32_KERNELS = op_types("""
    BandedTriangularSolve Betainc CTCLoss CTCLossV2 Cholesky CholeskyGrad Eig GRUBlockCell
    GRUBlockCellGrad IRFFT IRFFT2D IRFFT3D LogMatrixDeterminant Lu MatrixDeterminant
    MatrixExponential MatrixInverse MatrixSolve MatrixSolveLs MatrixSquareRoot
    MatrixTriangularSolve NextAfter Polygamma Qr RFFT RFFT2D RFFT3D RFFTND SelfAdjointEigV2 Svd
    TridiagonalMatMul TridiagonalSolve Zeta
""")

# Ops that take several tensors of one dtype and compute, join or compare them. Autocast gives those
# of any other op one dtype too, as TensorFlow would refuse them; these are what programs use.
JOINING = op_types("""
    AccumulateNV2 Add AddN AddV2 ApproximateEqual Atan2 BiasAdd BiasAddV1 ClipByValue Concat
    ConcatV2 Cross Dilation2D Div DivNoNan DynamicStitch Equal FloorDiv FloorMod Greater
    GreaterEqual Igamma Igammac Less LessEqual LinSpace LowerBound MatrixDiagPartV2
    MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3
    Maximum Minimum Mod Mul MulNoNan NotEqual OneHot Pack PadV2 ParallelConcat
    ParallelDynamicStitch Pow RaggedTensorToTensor Range RealDiv Select SelectV2
    SoftmaxCrossEntropyWithLogits SparseAdd SparseConcat SparseDenseCwiseAdd SparseDenseCwiseDiv
    SparseDenseCwiseMul SparseFillEmptyRows SparseSparseMaximum SparseSparseMinimum
    SparseTensorDenseAdd SparseTensorDenseMatMul SparseToDense Sub TensorScatterAdd
    TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate
    TensorStridedSliceUpdate TruncateDiv TruncateMod UpperBound Xdivy XlaDynamicUpdateSlice
    Xlog1py Xlogy
""")
