"""Sets of op types that the op lists are made of; framework-free.

First the lists of TensorFlow's own graph pass, Grappler's `auto_mixed_precision`, in
TensorFlow 2.19 to 2.21, on a GPU with CUDA 9.1 and cuDNN 8.0 or newer for float16, and of
the CPU's oneDNN mode for bfloat16. A test compares them with the header of the installed
TensorFlow, so these names follow TensorFlow. Then, in addition to the four colours, the ops
that autocast computes in float32 or promotes. `tfamp.graph.op_lists` makes tfamp's own
lists from both.
"""

from __future__ import annotations

from tfamp.planning.structures import op_types

# Ops of other libraries: Grappler names them, TensorFlow does not register them.
EXTERNAL = op_types("""
    FastUnsortedSegmentMax FusedConv2DBiasActivation FusedSparseConvGpuV2 Mha MhaV2 Pmlp Tmlp
    TmlpV2 TmlpV3 VoxelMax
""")

# Ops whose results are stored, not computed from data: weights and constants.
STORED = op_types("Const HostConst ReadVariableOp Variable VariableV2")
# Ops that read elements of a TensorList, and ops that write them.
LIST_READERS = op_types("""
    TensorListConcat TensorListConcatV2 TensorListGather TensorListGetItem TensorListPopBack
    TensorListStack
""")
LIST_WRITERS = op_types("""
    TensorListFromTensor TensorListPushBack TensorListPushBackBatch TensorListScatter
    TensorListScatterIntoExistingList TensorListScatterV2 TensorListSetItem TensorListSplit
""")
CUDNN_RNN = op_types("""
    CudnnRNN CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 CudnnRNNV2 CudnnRNNV3
""")

# Ops that select or compare values and do not compute new ones.
CHOICES = op_types("""
    ClipByValue Equal Greater GreaterEqual Less LessEqual Maximum Minimum NotEqual
    Select SelectV2
""")
CROSS_ENTROPIES = op_types("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits")

# Both dtypes.
_ALLOW = op_types("""
    BatchMatMul BatchMatMulV2 Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D
    Conv3DBackpropFilterV2 Conv3DBackpropInputV2 DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Einsum MatMul
""")
_INFER = op_types("""
    Add AddN AddV2 AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BiasAdd BiasAddGrad BiasAddV1 Elu
    EluGrad Erf Erfc FloorDiv FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2
    FusedBatchNormV3 Inv LeakyRelu LeakyReluGrad Log Log1p LogSoftmax Mul Prod RealDiv
    Reciprocal Selu SeluGrad Sigmoid SigmoidGrad Softmax Softplus SoftplusGrad Softsign
    SoftsignGrad Sqrt Sub Tanh TanhGrad _FusedBatchNormEx
""")
_DENY = op_types("""
    Exp Expm1 L2Loss Pow SaveV2 SoftmaxCrossEntropyWithLogits
    SparseSoftmaxCrossEntropyWithLogits
""")
_CLEAR = op_types("""
    Abs ArgMax ArgMin BatchToSpace BatchToSpaceND BroadcastTo Ceil CheckNumerics ClipByValue
    Concat ConcatV2 DepthToSpace DynamicPartition DynamicStitch EnsureShape Enter Equal Exit
    ExpandDims Fill Floor Gather GatherNd GatherV2 Greater GreaterEqual Identity IdentityN
    IsFinite IsInf IsNan Less LessEqual Max MaxPool MaxPool3D MaxPool3DGrad MaxPoolGrad
    MaxPoolGradGrad MaxPoolGradGradV2 MaxPoolGradV2 MaxPoolV2 Maximum Merge Min Minimum
    MirrorPad MirrorPadGrad Neg NextIteration NotEqual OnesLike Pack Pad PadV2
    PreventGradient Rank Relu Relu6 Relu6Grad ReluGrad Reshape ResizeNearestNeighbor
    ResizeNearestNeighborGrad Reverse ReverseSequence ReverseV2 Round Select SelectV2 Shape
    ShapeN Sign Slice Snapshot SpaceToBatch SpaceToBatchND SpaceToDepth Split SplitV Squeeze
    StopGradient StridedSlice StridedSliceGrad Switch TensorListConcatLists Tile TopK TopKV2
    Transpose Unpack Where ZerosLike
""")
_CLEAR |= LIST_READERS | LIST_WRITERS

FLOAT16_ALLOW = op_types("""
    BlockLSTM BlockLSTMGrad BlockLSTMGradV2 BlockLSTMV2 Conv3DBackpropFilter Conv3DBackpropInput
    GRUBlockCell GRUBlockCellGrad LSTMBlockCell LSTMBlockCellGrad
""")
FLOAT16_ALLOW |= _ALLOW | CUDNN_RNN | EXTERNAL
FLOAT16_INFER = _INFER
# In float16 a sum overflows long before its terms do.
FLOAT16_DENY = _DENY | {"Mean", "Sum"}
FLOAT16_CLEAR = _CLEAR | {"MaxPool3DGradGrad", "OneHot", "Size"}

BFLOAT16_ALLOW = _ALLOW | {"FusedPadConv2D"}
BFLOAT16_INFER = _INFER | {"Mean", "Rsqrt", "Square", "SquaredDifference", "Sum"}
BFLOAT16_DENY = _DENY
BFLOAT16_CLEAR = _CLEAR | {"ResizeBilinear", "ScatterNd", "StatelessWhile", "While"}

# ---- Autocast --------------------------------------------------------------------------

# Sensitive to rounding or overflow. PyTorch's autocast computes their counterparts in float32,
# but for Mean, which Grappler denies in float16: it sums first. Square is PyTorch's pow,
# SquaredDifference its mse_loss, Xlogy and Xlog1py its kl_div. The gradient of Xdivy squares
# the divisor.
PRECISE = op_types("""
    Acos Asin Cosh Cumprod Cumsum CumulativeLogsumexp Erfinv EuclideanNorm Exp Expm1 Inv L2Loss
    Log Log1p LogSoftmax Mean Ndtri Pow Prod Reciprocal ResizeBicubic ResizeBilinear Rsqrt
    ScaleAndTranslate Sinh Softmax SoftmaxCrossEntropyWithLogits Softplus SparseSoftmax
    SparseSoftmaxCrossEntropyWithLogits Square SquaredDifference Sum Tan Xdivy Xlog1py Xlogy
""")

# Decompositions, solvers, transforms and others whose kernels, for some device at least, are
# float32 and float64 only: a low-precision input would be an error. Where PyTorch has the op,
# its autocast does the same. The inputs of CTCLossV2 are float32 without a type attribute.
FLOAT32_KERNELS = op_types("""
    BandedTriangularSolve Betainc CTCLoss CTCLossV2 Cholesky CholeskyGrad Eig GRUBlockCell
    GRUBlockCellGrad IRFFT IRFFT2D IRFFT3D LogMatrixDeterminant Lu MatrixDeterminant
    MatrixExponential MatrixInverse MatrixSolve MatrixSolveLs MatrixSquareRoot
    MatrixTriangularSolve NextAfter Polygamma Qr RFFT RFFT2D RFFT3D RFFTND SelfAdjointEigV2 Svd
    TridiagonalMatMul TridiagonalSolve Zeta
""")

# Decompositions and solvers: they multiply the rounding errors of their inputs by the condition
# number of a matrix, and a matrix that is not positive definite any more is an error.
DECOMPOSITIONS = op_types("""
    BandedTriangularSolve Cholesky CholeskyGrad Eig LogMatrixDeterminant Lu MatrixDeterminant
    MatrixExponential MatrixInverse MatrixLogarithm MatrixSolve MatrixSolveLs MatrixSquareRoot
    MatrixTriangularSolve Qr SelfAdjointEigV2 Svd TridiagonalSolve
""")

# Common ops that compute, join or compare several tensors of one dtype. Autocast promotes the
# inputs of other such ops too, as TensorFlow would refuse them.
JOINING = op_types("""
    AccumulateNV2 Add AddN AddV2 ApproximateEqual Atan2 BiasAdd BiasAddV1 ClipByValue Concat
    ConcatV2 Cross Dilation2D Div DivNoNan DynamicStitch Equal FloorDiv FloorMod Greater
    GreaterEqual Igamma Igammac Less LessEqual LinSpace LowerBound MatrixDiagPartV2
    MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2
    MatrixSetDiagV3 Maximum Minimum Mod Mul MulNoNan NotEqual OneHot Pack PadV2
    ParallelConcat ParallelDynamicStitch Pow RaggedTensorToTensor Range RealDiv Select
    SelectV2 SoftmaxCrossEntropyWithLogits SparseAdd SparseConcat SparseDenseCwiseAdd
    SparseDenseCwiseDiv SparseDenseCwiseMul SparseFillEmptyRows SparseSparseMaximum
    SparseSparseMinimum SparseTensorDenseAdd SparseTensorDenseMatMul SparseToDense Sub
    TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub
    TensorScatterUpdate TensorStridedSliceUpdate TruncateDiv TruncateMod UpperBound Xdivy
    XlaDynamicUpdateSlice Xlog1py Xlogy
""")
